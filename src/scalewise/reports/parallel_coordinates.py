"""Parallel coordinates of varied settings and results, one line per job."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
from markupsafe import Markup

from scalewise.reports import number_format, summary_sentences
from scalewise.reports.chart_layout import (
    CHARACTER_WIDTH,
    GREY,
    INK,
    NARROW,
    PAGE,
    ChartDrawing,
    ChartSheet,
    build_frame,
    draw_both_widths,
    text_width,
)
from scalewise.reports.compare import (
    LOSS,
    MAX_CHARTED_JOBS,
    PEAK,
    PRICE,
    STEP,
    ReportComparison,
    ReportJob,
)
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.pareto import ColorBin, color_bins
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.wandb_panels import CoordinatesPanel, RunSetting, SummaryNumber, TitledPanel

MIN_JOBS = 3
"""Minimum number of jobs."""
MAX_TICKS = 6
"""Maximum number of labeled values of a setting; of more, the first and the last are labeled."""
Rows = list[dict[str, Any]]
ROW_HEIGHT = 90
"""Pixels between horizontal axes on a narrow page."""


@dataclass(frozen=True)
class CoordinateAxis:
    """An axis of the chart."""

    label: str
    """Title."""
    positions: dict[ReportJob, float]
    """Position of each job, from 0 to 1."""
    ticks: tuple[tuple[float, str], ...]
    """Position and text of each tick."""
    wandb_axis: RunSetting | SummaryNumber
    """Axis of the W&B panel."""


def coordinates_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Parallel-coordinates section; ``None`` below :data:`MIN_JOBS` jobs."""
    jobs = [job for job in comparison.rank_jobs(STEP, False) if job.measured(PEAK) is not None]
    if len(jobs) < MIN_JOBS:
        return None
    settings = [axis for key in comparison.varying if (axis := _setting_axis(jobs, key))]
    kinds: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
        (STEP, "step, ms", number_format.format_milliseconds),
        (PEAK, f"peak, {unit.name}", unit.text),
        (PRICE, "$ per billion tokens", number_format.format_price),
        (LOSS, "train loss", number_format.format_loss),
    )
    results = [axis for kind in kinds if (axis := _number_axis(jobs, *kind))]
    if not settings or not results:
        return None
    axes = [*settings, *results]
    color_key, color_label, text = (
        kinds[-1] if results[-1].wandb_axis == SummaryNumber(LOSS) else kinds[0]
    )
    bins = color_bins(
        [number for job in jobs if (number := job.measured(color_key)) is not None], text
    )
    sentence = (
        f"Lines: settings and results of {number_format.pluralize(len(jobs), 'job')}, axis by axis."
    )
    picture = draw_both_widths(
        lambda width: _draw_axes(
            axes, jobs, _line_colors(jobs, color_key, bins), comparison, width
        ),
        "coordinates",
        sentence,
    )
    has_faint = len(jobs) > MAX_CHARTED_JOBS
    return ReportSection(
        "coordinates",
        "Parallel coordinates",
        _finding_text(comparison, jobs),
        (ChartPanel("One line per job", "varied settings, then results", picture),),
        (("", color_label), *((shade.color, shade.label) for shade in bins)),
        explanation=(
            "Axes of results run from the smallest value, at the bottom or left, to the largest."
            + (" Thin lines: jobs not in the charts above." if has_faint else ""),
        ),
        wandb_panels=(
            TitledPanel(
                "Parallel coordinates: settings and results",
                CoordinatesPanel(tuple((a.wandb_axis, a.label) for a in axes)),
            ),
        ),
    )


def _setting_axis(jobs: Sequence[ReportJob], key: str) -> CoordinateAxis | None:
    """Axis of a setting with evenly spaced values, sorted as numbers or else by name."""
    job_values = {
        job: number_format.format_value(job.run.varied_settings[key])
        for job in jobs
        if key in job.run.varied_settings
    }
    values = sorted(dict.fromkeys(job_values.values()))
    if len(values) < 2:
        return None
    with suppress(ValueError):
        values.sort(key=float)
    positions = {value: index / (len(values) - 1) for index, value in enumerate(values)}
    labeled = values if len(values) <= MAX_TICKS else [values[0], values[-1]]
    is_option = any(key in job.run.choices for job in jobs)
    job_positions = {job: positions[value] for job, value in job_values.items()}
    ticks = tuple((positions[value], value) for value in labeled)
    return CoordinateAxis(key, job_positions, ticks, RunSetting(key, is_option))


def _number_axis(
    jobs: Sequence[ReportJob], key: str, label: str, text: Callable[[float | None], str]
) -> CoordinateAxis | None:
    values = {job: number for job in jobs if (number := job.measured(key)) is not None}
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
    if text(low) == text(high):
        return None
    positions = {job: (number - low) / (high - low) for job, number in values.items()}
    ticks = ((0.0, text(low)), (1.0, text(high)))
    return CoordinateAxis(label, positions, ticks, SummaryNumber(key))


def _line_colors(
    jobs: Sequence[ReportJob], key: str, bins: Sequence[ColorBin]
) -> dict[ReportJob, str]:
    def color_of(number: float | None) -> str:
        matching = (one.color for one in bins if number is not None and number <= one.high)
        return next(matching, "--m-other")

    return {job: color_of(job.measured(key)) for job in jobs}


def _finding_text(comparison: ReportComparison, jobs: Sequence[ReportJob]) -> Markup:
    """Settings that the fastest jobs share, or the fastest job if one setting varies."""
    if len(comparison.varying) == 1:
        count = number_format.pluralize(len(jobs), "job")
        return Markup("{} is the fastest of {}").format(jobs[0].name, count)
    best = jobs[: max(2, len(jobs) // 4)]
    shared = []
    for key in comparison.varying:
        values = {number_format.format_value(job.run.varied_settings.get(key)) for job in best}
        if len(values) == 1:
            shared.append(f"{key}={values.pop()}")
    count = number_format.pluralize(len(best), "fastest job")
    if not shared:
        return Markup("The {} have no setting in common").format(count)
    return Markup("The {} have {} in common").format(count, summary_sentences.join_words(shared))


def _draw_axes(
    axes: Sequence[CoordinateAxis],
    jobs: Sequence[ReportJob],
    colors: dict[ReportJob, str],
    comparison: ReportComparison,
    width: int,
) -> ChartDrawing:
    """Draw vertical axes side by side, or on a narrow page horizontal axes in rows."""
    sheet, is_vertical = ChartSheet(), width == NARROW
    axis_length = 300 if not is_vertical else width - 24
    last_width = text_width([text for _, text in axes[-1].ticks], 120)
    gap = ROW_HEIGHT if is_vertical else (width - 16 - last_width) / max(len(axes) - 1, 1)

    def locate(index: int, fraction: float) -> tuple[float, float]:
        """Pixel coordinates of a position on an axis, from the upper left."""
        return (
            (fraction * axis_length, index * gap)
            if is_vertical
            else (index * gap, (1 - fraction) * axis_length)
        )

    plot_height = (len(axes) - 1) * gap if is_vertical else axis_length
    plot_width = axis_length if is_vertical else (len(axes) - 1) * gap
    x = alt.X(
        "x:Q", scale=alt.Scale(domain=[0, plot_width], range=[0, plot_width], nice=False), axis=None
    )
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=[0, plot_height], range=[0, plot_height], nice=False),
        axis=None,
    )
    rules = []
    for index in range(len(axes)):
        (x1, y1), (x2, y2) = locate(index, 0), locate(index, 1)
        rules.append({"x": x1, "y": y1, "x2": x2, "y2": y2})
    layers = []
    for faint in (True, False):
        rows = []
        for number, job in enumerate(jobs):
            if (job not in comparison.charted_jobs) is not faint:
                continue
            ink = "var(--faint)" if faint else f"var({colors[job]})"
            for index, axis in enumerate(axes):
                if job in axis.positions:
                    a, b = locate(index, axis.positions[job])
                    rows.append(
                        {"x": a, "y": b, "o": index, "line": number, "tip": job.name, "c": ink}
                    )
        if rows:
            mark = sheet.chart(rows).mark_line(
                strokeWidth=1 if faint else 2, opacity=1, strokeJoin="round"
            )
            layers.append(
                mark.encode(
                    x=x,
                    y=y,
                    order="o:Q",
                    detail="line:N",
                    description="tip:N",
                    color=alt.Color("c:N", scale=None, legend=None),
                )
            )
    rule = sheet.chart(rules).mark_rule(color=INK, strokeWidth=1, opacity=1)
    layers.append(rule.encode(x=x, y=y, x2="x2:Q", y2="y2:Q"))
    layers += _axis_labels(sheet, axes, locate, is_vertical, x, y)
    pads = (12, 12, 24, 20) if is_vertical else (8, 8 + last_width, 38, 10)
    return build_frame(sheet, layers, width, round(plot_height), pads)


def _axis_labels(
    sheet: ChartSheet,
    axes: Sequence[CoordinateAxis],
    locate: Callable[[int, float], tuple[float, float]],
    is_vertical: bool,
    x: alt.X,
    y: alt.Y,
) -> list[alt.Chart]:
    """Titles and tick labels of the axes, with an outline in the page color."""
    names: Rows = []
    texts: Rows = []
    for index, axis in enumerate(axes):
        a, b = locate(index, 0 if is_vertical else 1)
        names.append({"x": a, "y": b - (10 if is_vertical else 26), "t": axis.label})
        for fraction, text in axis.ticks:
            a, b = locate(index, fraction)
            corner = (
                (a - fraction * len(text) * CHARACTER_WIDTH, b + 12)
                if is_vertical
                else (a + 6, b - 9)
            )
            texts.append({"x": corner[0], "y": corner[1], "t": text})
    layers = []
    weights: tuple[tuple[Rows, str, Literal[600, 400]], ...] = (
        (names, INK, 600),
        (texts, GREY, 400),
    )
    for rows, color, weight in weights:
        for fill, outline in ((PAGE, 4), (color, 0)):
            mark = sheet.chart(rows).mark_text(
                align="left",
                baseline="middle",
                fontSize=12,
                fontWeight=weight,
                color=fill,
                stroke=PAGE if outline else "transparent",
                strokeWidth=outline,
                opacity=1,
            )
            layers.append(mark.encode(x=x, y=y, text="t:N"))
    return layers
