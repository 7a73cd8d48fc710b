"""Factorial screening: effects of two-level factors and their interactions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import altair as alt
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from scalewise.reports import number_format, summary_sentences
from scalewise.reports.chart_layout import (
    GREY,
    INK,
    NARROW,
    ChartDrawing,
    ChartSheet,
    build_axis,
    build_frame,
    draw_both_widths,
    round_ticks,
    text_width,
)
from scalewise.reports.compare import PEAK, STEP, ReportComparison
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection

MIN_FACTORS = 3
"""Minimum number of factors."""

MAX_CHARTED_EFFECTS = 10
"""Maximum number of charted effects; the table lists all."""

NOUNS = {STEP: "step time", PEAK: "peak memory"}


@dataclass(frozen=True)
class ScreeningEffects:
    """Effects of the factors on each metric."""

    levels: Mapping[str, tuple[object, object]]
    """First and second level of each factor."""
    by_metric: Mapping[str, FactorEffects]
    """Effects by metric key."""

    def label(self, name: Name) -> str:
        """Name of an effect: ``memory checkpoint_full``, or ``memory x lr`` for an interaction."""
        short = [key.rpartition(".")[2] for key in name]
        if len(name) == 1:
            return f"{short[0]} {number_format.format_value(self.levels[name[0]][1])}"
        return f" {number_format.TIMES} ".join(short)


def screening_effects(comparison: ReportComparison) -> ScreeningEffects | None:
    """Effects of a sweep over three or more two-level factors; seeds are replicates.

    ``None`` for any other sweep and if too few jobs finished.
    """
    varying = {key: values for key, values in comparison.varying.items() if key != "seed"}
    if len(varying) < MIN_FACTORS or any(len(values) != 2 for values in varying.values()):
        return None
    levels = {key: (values[0], values[1]) for key, values in varying.items()}
    by_metric = {}
    for metric in NOUNS:
        jobs = comparison.rank_jobs(metric, False)
        measured = [job.measured(metric) or 0.0 for job in jobs]
        signs = {
            key: [-1 if str(job.run.varied_settings.get(key)) == str(first) else 1 for job in jobs]
            for key, (first, _) in levels.items()
        }
        if len(jobs) > len(levels) and min(measured) > 0:
            by_metric[metric] = factor_effects(signs, measured)
    return ScreeningEffects(levels, by_metric) if by_metric else None


def screening_section(comparison: ReportComparison) -> ReportSection | None:
    """Section of effects with confidence intervals; ``None`` for other sweeps."""
    screening = screening_effects(comparison)
    if screening is None:
        return None
    panels = []
    for metric, result in screening.by_metric.items():
        noun, charted = NOUNS[metric], result.effects[:MAX_CHARTED_EFFECTS]
        labels = [screening.label(effect.name) for effect in charted]
        picture = draw_both_widths(
            partial(_effects_dots, charted, labels),
            f"effects-{noun.replace(' ', '-')}",
            f"Dots: change of {noun} for {number_format.pluralize(len(charted), 'effect')}.",
        )
        detail = "change in %, from the first level to the second; negative is less"
        panels.append(ChartPanel(number_format.capitalize_first(noun), detail, picture))
    return ReportSection(
        "effects",
        "Factor effects",
        finding_text(screening),
        tuple(panels),
        notes=tuple(_effect_notes(screening)),
        numbers=_effects_table(screening),
    )


def finding_text(screening: ScreeningEffects) -> Markup:
    """Largest significant effect on each metric; without intervals, the largest effect."""
    findings = []
    for metric, result in screening.by_metric.items():
        main_effects = [effect for effect in result.effects if len(effect.name) == 1]
        candidates = [
            effect
            for effect in main_effects
            if effect.is_significant or not result.degrees_of_freedom
        ]
        if candidates:
            largest = candidates[0]
            name, change = screening.label(largest.name), format_signed(largest.change)
            findings.append(f"{name} changes {NOUNS[metric]} most ({change})")
        else:
            findings.append(f"no effect on {NOUNS[metric]} is significant")
    return summary_sentences.join_words(
        [number_format.capitalize_first(findings[0]), *findings[1:]]
    )


def format_signed(share: float | None) -> str:
    """Format a fraction as a signed percentage: ``+12%``; ``0%`` and ``<1%`` have no sign."""
    text = number_format.format_percent(None if share is None else abs(share))
    if share is None or text in ("0%", "<1%"):
        return text
    return f"{number_format.MINUS if share < 0 else '+'}{text}"


def _effect_notes(screening: ScreeningEffects) -> list[str]:
    first = next(iter(screening.by_metric.values()))
    jobs = number_format.pluralize(first.jobs, "job")
    notes = [
        f"Changes are of the geometric mean over {jobs}, averaged over the other factors. "
        "An interaction is the further change of one factor at the second level of the other.",
        f"95% intervals by Student's t with {first.degrees_of_freedom} degrees of freedom."
        if first.degrees_of_freedom
        else "No intervals: there are as many jobs as effects. Add replicates to get them.",
    ]
    aliased = [
        " = ".join(screening.label(name) for name in (effect.name, *effect.aliases))
        for effect in first.effects
        if effect.aliases
    ]
    if aliased:
        notes.append(f"Aliased effects, not distinguishable: {'; '.join(aliased)}.")
    if first.inestimable:
        names = ", ".join(screening.label(name) for name in first.inestimable)
        notes.append(f"Not estimable, because some jobs failed: {names}.")
    return notes


def _effects_table(screening: ScreeningEffects) -> NumbersTable:
    heads = [head for metric in screening.by_metric for head in (NOUNS[metric], "95% interval")]
    by_name: dict[Name, list[str]] = {}
    for index, result in enumerate(screening.by_metric.values()):
        for effect in result.effects:
            cells = by_name.setdefault(effect.name, [number_format.MISSING] * len(heads))
            cells[2 * index : 2 * index + 2] = [
                format_signed(effect.change),
                _interval_text(effect),
            ]
    rows = tuple((screening.label(name), tuple(cells)) for name, cells in by_name.items())
    return NumbersTable("", tuple(heads), rows)


def _interval_text(effect: FactorEffect) -> str:
    if effect.low is None:
        return number_format.MISSING
    return f"{format_signed(effect.low)} to {format_signed(effect.high)}"


def _effects_dots(
    effects: Sequence[FactorEffect], labels: Sequence[str], width: int
) -> ChartDrawing:
    """Draw one row per effect: a dot on its interval, blue if the interval excludes 0."""
    sheet, narrow = ChartSheet(), width == NARROW
    row = 40 if narrow else 26
    column = 56
    left = 1 if narrow else text_width(labels, 240)
    right = 10 if narrow else column + 8
    inner, height = width - left - right, row * len(effects)
    extent = max(abs(effect.change) for effect in effects) * 1.5 or 0.01
    ends = [
        min(max(end or 0, -extent), extent) for e in effects for end in (e.low, e.high, e.change)
    ]
    low, high = min(*ends, 0) * 105, max(*ends, 0) * 105
    x_scale = alt.Scale(domain=[low, high if high > low else low + 1], nice=False, zero=False)
    y_scale = alt.Scale(domain=[0, height], range=[0, height], nice=False)
    rows, texts = [], []
    for index, (effect, label) in enumerate(zip(effects, labels, strict=True)):
        middle = index * row + (row - 11 if narrow else row / 2)
        bounds = (effect.change if end is None else end for end in (effect.low, effect.high))
        a, b = (min(max(100 * end, low), high) for end in bounds)
        tip = f"{label}: {format_signed(effect.change)}, 95% {_interval_text(effect)}"
        color = "var(--accent)" if effect.is_significant else "var(--m-other)"
        rows.append({"x": 100 * effect.change, "a": a, "b": b, "y": middle, "c": color,
                     "tip": tip})  # fmt: skip
        texts.append({"y": middle - 17 if narrow else middle, "name": label,
                      "number": format_signed(effect.change)})  # fmt: skip
    grid = build_axis(round_ticks(low, high, 4 if narrow else 6), grid=True)
    x = alt.X("x:Q", scale=x_scale, axis=grid)
    y = alt.Y("y:Q", scale=y_scale, axis=None)
    fill = alt.Color("c:N", scale=None, legend=None)
    zero = sheet.chart([{"x": 0}]).mark_rule(color=INK, opacity=1).encode(x=x)
    intervals = (
        sheet.chart(rows)
        .mark_rule(strokeWidth=2, opacity=1)
        .encode(x=alt.X("a:Q", scale=x_scale, axis=grid), x2="b:Q", y=y, color=fill)
    )
    points = sheet.chart(rows).mark_point(filled=True, size=70, opacity=1)
    dots = points.encode(x=x, y=y, color=fill, description="tip:N")
    base = sheet.chart(texts)
    names = base.mark_text(
        align="left" if narrow else "right", baseline="middle", fontSize=13, color=INK,
        limit=inner - column if narrow else left - 8,
    ).encode(x=alt.value(0 if narrow else -8), y=y, text="name:N")  # fmt: skip
    numbers = base.mark_text(align="right", baseline="middle", fontSize=12, color=GREY).encode(
        x=alt.value(inner if narrow else inner + right), y=y, text="number:N"
    )
    return build_frame(
        sheet, [zero, intervals, dots, names, numbers], width, height, (left, right, 4, 24)
    )


Floats = NDArray[np.float64]
Name = tuple[str, ...]
"""One factor, or the two factors of an interaction."""

CONFIDENCE = 0.95
MIN_CHANGE = 1e-4
"""Smallest significant change: byte counts have no noise, so their intervals are empty."""

COLLINEAR = 1e-9
"""Relative residual below which a column is a linear combination of others."""


@dataclass(frozen=True)
class FactorEffect:
    """Main effect of a factor, or interaction of two.

    A main effect is the change from the first level to the second. An interaction is the further
    change of one factor at the second level of the other, relative to the average.
    """

    name: Name
    """The factor or factors."""
    change: float
    """Relative change."""
    low: float | None
    """Lower end of the 95 % interval; ``None`` without degrees of freedom."""
    high: float | None
    """Upper end of the 95 % interval."""
    aliases: tuple[Name, ...] = ()
    """Interactions that the design cannot distinguish from this effect."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        if self.low is None or self.high is None or abs(self.change) < MIN_CHANGE:
            return False
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class FactorEffects:
    """Effects on one metric."""

    effects: tuple[FactorEffect, ...]
    """Effects, largest first."""
    inestimable: tuple[Name, ...]
    """Effects that cannot be estimated, because some jobs failed."""
    jobs: int
    """Number of jobs."""
    degrees_of_freedom: int
    """Degrees of freedom of the residual variance."""


def factor_effects(levels: Mapping[str, Sequence[int]], measured: Sequence[float]) -> FactorEffects:
    """Estimate main effects and two-factor interactions.

    Args:
        levels: Level, -1 or 1, of each job by factor.
        measured: Positive measurement of each job.

    Interactions of three or more factors count as noise.
    """
    logs = np.log(np.asarray(measured, dtype=float))
    intercept = np.ones_like(logs)
    columns: dict[Name, Floats] = {
        (key,): np.asarray(each, dtype=float) for key, each in levels.items()
    }
    for one, other in combinations(levels, 2):
        columns[one, other] = columns[(one,)] * columns[(other,)]
    independent: dict[Name, Floats] = {}
    aliases: dict[Name, list[Name]] = {}
    inestimable: list[Name] = []
    for name, column in columns.items():
        if _relative_residual([intercept, *independent.values()], column) > COLLINEAR:
            independent[name] = column
        elif (alias := _find_alias(independent, column)) is not None:
            aliases.setdefault(alias, []).append(name)
        else:
            inestimable.append(name)
    matrix = np.column_stack([intercept, *independent.values()])
    inverse = np.linalg.inv(matrix.T @ matrix)
    fitted = inverse @ matrix.T @ logs
    degrees_of_freedom = len(logs) - matrix.shape[1]
    half_widths = np.full(len(fitted), np.nan)
    if degrees_of_freedom > 0:
        variance = float(np.sum((logs - matrix @ fitted) ** 2)) / degrees_of_freedom
        half_widths = student_t_95(degrees_of_freedom) * np.sqrt(variance * np.diag(inverse))
    effects = [
        FactorEffect(
            name, *_effect_shares(fitted[index], half_widths[index]), tuple(aliases.get(name, ()))
        )
        for index, name in enumerate(independent, start=1)
    ]
    effects.sort(key=lambda effect: -abs(np.log1p(effect.change)))
    return FactorEffects(tuple(effects), tuple(inestimable), len(logs), degrees_of_freedom)


def student_t_95(degrees_of_freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    With ``t = sqrt(n) tan(angle)`` for ``n`` degrees of freedom, the density is a power of the
    cosine, which is integrated numerically.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    cumulative = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(
        np.sqrt(degrees_of_freedom)
        * np.tan(np.interp(CONFIDENCE, cumulative / cumulative[-1], angles))
    )


def _effect_shares(
    coefficient: float, half_width: float
) -> tuple[float, float | None, float | None]:
    """Relative change and its interval; from -1 to 1 is twice the coefficient."""
    ends = (
        (None, None)
        if np.isnan(half_width)
        else (coefficient - half_width, coefficient + half_width)
    )
    low, high = (None if end is None else float(np.expm1(2 * end)) for end in ends)
    return float(np.expm1(2 * coefficient)), low, high


def _relative_residual(known_columns: Sequence[Floats], column: Floats) -> float:
    """Norm of the residual of ``column`` regressed on ``known_columns``, relative to its norm."""
    matrix = np.column_stack(known_columns)
    residual = column - matrix @ np.linalg.lstsq(matrix, column, rcond=None)[0]
    return float(np.linalg.norm(residual) / np.linalg.norm(column))


def _find_alias(known_columns: Mapping[Name, Floats], column: Floats) -> Name | None:
    names: Iterator[Name] = (n for n, k in known_columns.items() if abs(k @ column) == len(column))
    return next(names, None)
