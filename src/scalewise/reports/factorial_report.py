"""What each technique of a screen did, alone and in pairs: step time and peak memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import altair as alt
from markupsafe import Markup

from scalewise.reports import factorial_effects, number_format, summary_sentences
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
from scalewise.reports.factorial_effects import FactorEffect, FactorEffects, Name
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection

LEAST = 3
"""Factors below which a page has better ways to compare."""

DRAWN = 10
"""Effects that are drawn; the table has all."""

NOUNS = {STEP: "step time", PEAK: "peak memory"}


@dataclass(frozen=True)
class ScreeningEffects:
    """The effects on each measurement, and what the factors' second levels are."""

    levels: Mapping[str, tuple[object, object]]
    by_metric: Mapping[str, FactorEffects]

    def label(self, name: Name) -> str:
        """Returns how the page calls an effect: ``memory checkpoint_full``, ``memory x lr``."""
        short = [key.rpartition(".")[2] for key in name]
        if len(name) == 1:
            return f"{short[0]} {number_format.format_value(self.levels[name[0]][1])}"
        return f" {number_format.TIMES} ".join(short)


def screening_effects(comparison: ReportComparison) -> ScreeningEffects | None:
    """Returns the effects of a sweep over three or more two-level factors, repeats by seed apart.

    None for any other sweep, and where too few jobs finished.
    """
    varying = {key: values for key, values in comparison.varying.items() if key != "seed"}
    if len(varying) < LEAST or any(len(values) != 2 for values in varying.values()):
        return None
    levels = {key: (values[0], values[1]) for key, values in varying.items()}
    found = {}
    for metric in NOUNS:
        jobs = comparison.rank_jobs(metric, False)
        measured = [job.measured(metric) or 0.0 for job in jobs]
        signs = {
            key: [-1 if str(job.run.varied_settings.get(key)) == str(rest) else 1 for job in jobs]
            for key, (rest, _) in levels.items()
        }
        if len(jobs) > len(levels) and min(measured) > 0:
            found[metric] = factorial_effects.factor_effects(signs, measured)
    return ScreeningEffects(levels, found) if found else None


def screening_section(comparison: ReportComparison) -> ReportSection | None:
    """Returns the effects as dots with their intervals; ``None`` where nothing was screened."""
    screen = screening_effects(comparison)
    if screen is None:
        return None
    panels = []
    for metric, found in screen.by_metric.items():
        noun, drawn = NOUNS[metric], found.effects[:DRAWN]
        labels = [screen.label(effect.name) for effect in drawn]
        picture = draw_both_widths(
            partial(_effects_dots, drawn, labels),
            f"effects-{noun.replace(' ', '-')}",
            f"Dots: change of {noun} by {number_format.pluralize(len(drawn), 'effect')}.",
        )
        detail = "change in %, from the first value to the second; left is less"
        panels.append(ChartPanel(number_format.capitalize_first(noun), detail, picture))
    return ReportSection(
        "effects",
        "Effects",
        finding_text(screen),
        tuple(panels),
        notes=tuple(_effect_notes(screen)),
        numbers=_effects_table(screen),
    )


def finding_text(screening: ScreeningEffects) -> Markup:
    """Returns which technique moves what most, where its interval, if any, says that it does."""
    said = []
    for metric, found in screening.by_metric.items():
        alone = [effect for effect in found.effects if len(effect.name) == 1]
        clear = [
            effect for effect in alone if effect.is_significant or not found.degrees_of_freedom
        ]
        if clear:
            most = clear[0]
            name, change = screening.label(most.name), format_signed(most.change)
            said.append(f"{name} moves {NOUNS[metric]} most ({change})")
        else:
            said.append(f"no effect on {NOUNS[metric]} stands out of the noise")
    return summary_sentences.join_words([number_format.capitalize_first(said[0]), *said[1:]])


def format_signed(share: float | None) -> str:
    """Returns a change with its sign, where it is one: ``+12%``, ``<1%``."""
    text = number_format.format_percent(None if share is None else abs(share))
    if share is None or text in ("0%", "<1%"):
        return text
    return f"{number_format.MINUS if share < 0 else '+'}{text}"


def _effect_notes(screening: ScreeningEffects) -> list[str]:
    any_of = next(iter(screening.by_metric.values()))
    jobs = number_format.pluralize(any_of.jobs, "job")
    said = [
        f"Each change is that of the geometric mean over {jobs}, "
        "whatever else varied. Of a pair: how much more the one changes beside the other.",
        f"95% intervals by Student's t with {any_of.degrees_of_freedom} degrees of freedom."
        if any_of.degrees_of_freedom
        else "No intervals: the jobs are as many as the effects. Repeat them to get some.",
    ]
    mixed = [
        " = ".join(screening.label(name) for name in (effect.name, *effect.aliases))
        for effect in any_of.effects
        if effect.aliases
    ]
    if mixed:
        said.append(f"These jobs cannot tell apart: {'; '.join(mixed)}.")
    if any_of.inestimable:
        lost = ", ".join(screening.label(name) for name in any_of.inestimable)
        said.append(f"For want of jobs that finished, not told: {lost}.")
    return said


def _effects_table(screening: ScreeningEffects) -> NumbersTable:
    heads = [head for metric in screening.by_metric for head in (NOUNS[metric], "95% interval")]
    by_name: dict[Name, list[str]] = {}
    for place, found in enumerate(screening.by_metric.values()):
        for effect in found.effects:
            cells = by_name.setdefault(effect.name, [number_format.MISSING] * len(heads))
            cells[2 * place : 2 * place + 2] = [
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
    """Returns a row an effect: a dot on its interval, blue where that leaves out no change."""
    sheet, narrow = ChartSheet(), width == NARROW
    row = 40 if narrow else 26
    column = 56
    left = 1 if narrow else text_width(labels, 240)
    right = 10 if narrow else column + 8
    inner, height = width - left - right, row * len(effects)
    most = max(abs(effect.change) for effect in effects) * 1.5 or 0.01
    ends = [min(max(end or 0, -most), most) for e in effects for end in (e.low, e.high, e.change)]
    low, high = min(*ends, 0) * 105, max(*ends, 0) * 105
    across = alt.Scale(domain=[low, high if high > low else low + 1], nice=False, zero=False)
    down = alt.Scale(domain=[0, height], range=[0, height], nice=False)
    rows, texts = [], []
    for place, (effect, label) in enumerate(zip(effects, labels, strict=True)):
        middle = place * row + (row - 11 if narrow else row / 2)
        bounds = (effect.change if end is None else end for end in (effect.low, effect.high))
        a, b = (min(max(100 * end, low), high) for end in bounds)
        tip = f"{label}: {format_signed(effect.change)}, 95% {_interval_text(effect)}"
        colour = "var(--accent)" if effect.is_significant else "var(--m-other)"
        rows.append({"x": 100 * effect.change, "a": a, "b": b, "y": middle, "c": colour,
                     "tip": tip})  # fmt: skip
        texts.append({"y": middle - 17 if narrow else middle, "name": label,
                      "number": format_signed(effect.change)})  # fmt: skip
    grid = build_axis(round_ticks(low, high, 4 if narrow else 6), grid=True)
    x = alt.X("x:Q", scale=across, axis=grid)
    y = alt.Y("y:Q", scale=down, axis=None)
    fill = alt.Color("c:N", scale=None, legend=None)
    zero = sheet.chart([{"x": 0}]).mark_rule(color=INK, opacity=1).encode(x=x)
    reach = (
        sheet.chart(rows)
        .mark_rule(strokeWidth=2, opacity=1)
        .encode(x=alt.X("a:Q", scale=across, axis=grid), x2="b:Q", y=y, color=fill)
    )
    spots = sheet.chart(rows).mark_point(filled=True, size=70, opacity=1)
    dots = spots.encode(x=x, y=y, color=fill, description="tip:N")
    base = sheet.chart(texts)
    names = base.mark_text(
        align="left" if narrow else "right", baseline="middle", fontSize=13, color=INK,
        limit=inner - column if narrow else left - 8,
    ).encode(x=alt.value(0 if narrow else -8), y=y, text="name:N")  # fmt: skip
    counted = base.mark_text(align="right", baseline="middle", fontSize=12, color=GREY).encode(
        x=alt.value(inner if narrow else inner + right), y=y, text="number:N"
    )
    return build_frame(
        sheet, [zero, reach, dots, names, counted], width, height, (left, right, 4, 24)
    )
