"""Settings and what came of them, side by side: parallel coordinates, one line a job."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
from markupsafe import Markup

from scalewise.reports import number_format, summary_sentences
from scalewise.reports.chart_layout import (
    CHARACTER,
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
from scalewise.reports.compare import LOSS, PEAK, PRICE, SHOWN, STEP, ReportComparison, ReportJob
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.pareto import ColorBin, color_bins
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.summary_tables import format_price
from scalewise.reports.wandb_panels import CoordinatesPanel, RunSetting, SummaryNumber, TitledPanel

FEWEST = 3
"""Jobs below which lines show nothing that a table does not."""
MOST_TICKS = 6
"""Values of a setting that are written at its axis; of more, the first and the last."""
Rows = list[dict[str, Any]]
ROW = 90
"""Pixels from one axis to the next where they lie below each other."""


@dataclass(frozen=True)
class CoordinateAxis:
    """One axis: where each job stands on it, 0 to 1, and what is written at which place."""

    label: str
    positions: dict[ReportJob, float]
    ticks: tuple[tuple[float, str], ...]
    wandb_axis: RunSetting | SummaryNumber


def coordinates_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Returns the lines of the finished jobs; ``None`` where there are too few."""
    jobs = [job for job in comparison.rank_jobs(STEP, False) if job.measured(PEAK) is not None]
    if len(jobs) < FEWEST:
        return None
    settings = [axis for key in comparison.varying if (axis := _setting_axis(jobs, key))]
    kinds: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
        (STEP, "step, ms", number_format.format_milliseconds),
        (PEAK, f"peak, {unit.name}", unit.text),
        (PRICE, "$ a billion tokens", format_price),
        (LOSS, "train loss", number_format.format_loss),
    )
    results = [axis for kind in kinds if (axis := _number_axis(jobs, *kind))]
    if not settings or not results:
        return None
    axes = [*settings, *results]
    coloured, word, text = kinds[-1] if results[-1].wandb_axis == SummaryNumber(LOSS) else kinds[0]
    shades = color_bins(
        [number for job in jobs if (number := job.measured(coloured)) is not None], text
    )
    told = (
        f"Lines: settings and results of {number_format.pluralize(len(jobs), 'job')}, axis by axis."
    )
    picture = draw_both_widths(
        lambda width: _draw_axes(
            axes, jobs, _line_colors(jobs, coloured, shades), comparison, width
        ),
        "coordinates",
        told,
    )
    faint = len(jobs) > SHOWN
    return ReportSection(
        "coordinates",
        "Settings and results",
        _finding_text(comparison, jobs),
        (ChartPanel("One line a job", "from its settings to what came of them", picture),),
        (("", word), *((shade.colour, shade.label) for shade in shades)),
        reading=(
            "An axis of results runs from its smallest number, below or at the left, to its "
            "largest." + (" Jobs off the charts above are drawn thin." if faint else ""),
        ),
        live=(
            TitledPanel(
                "Settings and results",
                CoordinatesPanel(tuple((a.wandb_axis, a.label) for a in axes)),
            ),
        ),
    )


def _setting_axis(jobs: Sequence[ReportJob], key: str) -> CoordinateAxis | None:
    """Returns a setting's axis, its values evenly spaced: numbers by size, else by name."""
    own = {
        job: number_format.format_value(job.run.varied_settings[key])
        for job in jobs
        if key in job.run.varied_settings
    }
    values = sorted(dict.fromkeys(own.values()))
    if len(values) < 2:
        return None
    with suppress(ValueError):
        values.sort(key=float)
    spots = {value: place / (len(values) - 1) for place, value in enumerate(values)}
    told = values if len(values) <= MOST_TICKS else [values[0], values[-1]]
    option = any(key in job.run.choices for job in jobs)
    places = {job: spots[value] for job, value in own.items()}
    return CoordinateAxis(key, places, tuple((spots[v], v) for v in told), RunSetting(key, option))


def _number_axis(
    jobs: Sequence[ReportJob], key: str, label: str, text: Callable[[float | None], str]
) -> CoordinateAxis | None:
    known = {job: number for job in jobs if (number := job.measured(key)) is not None}
    low, high = min(known.values(), default=0.0), max(known.values(), default=0.0)
    if text(low) == text(high):
        return None
    places = {job: (number - low) / (high - low) for job, number in known.items()}
    return CoordinateAxis(label, places, ((0.0, text(low)), (1.0, text(high))), SummaryNumber(key))


def _line_colors(
    jobs: Sequence[ReportJob], key: str, shades: Sequence[ColorBin]
) -> dict[ReportJob, str]:
    def of(number: float | None) -> str:
        fitting = (shade.colour for shade in shades if number is not None and number <= shade.high)
        return next(fitting, "--m-other")

    return {job: of(job.measured(key)) for job in jobs}


def _finding_text(comparison: ReportComparison, jobs: Sequence[ReportJob]) -> Markup:
    """Returns which values the fastest jobs share; of one setting alone, which job is fastest."""
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
        return Markup("The {} share no setting").format(count)
    return Markup("The {} share {}").format(count, summary_sentences.join_words(shared))


def _draw_axes(
    axes: Sequence[CoordinateAxis],
    jobs: Sequence[ReportJob],
    colours: dict[ReportJob, str],
    comparison: ReportComparison,
    width: int,
) -> ChartDrawing:
    """Returns the axes side by side or, on a narrow page, one below the other."""
    sheet, down = ChartSheet(), width == NARROW
    long = 300 if not down else width - 24
    last = text_width([text for _, text in axes[-1].ticks], 120)
    gap = ROW if down else (width - 16 - last) / max(len(axes) - 1, 1)

    def at(place: int, share: float) -> tuple[float, float]:
        """Returns the pixels of a value on an axis, from the upper left."""
        return (share * long, place * gap) if down else (place * gap, (1 - share) * long)

    high = (len(axes) - 1) * gap if down else long
    wide = long if down else (len(axes) - 1) * gap
    x = alt.X("x:Q", scale=alt.Scale(domain=[0, wide], range=[0, wide], nice=False), axis=None)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[0, high], range=[0, high], nice=False), axis=None)
    rules = []
    for place in range(len(axes)):
        (x1, y1), (x2, y2) = at(place, 0), at(place, 1)
        rules.append({"x": x1, "y": y1, "x2": x2, "y2": y2})
    layers = []
    for faint in (True, False):
        rows = []
        for number, job in enumerate(jobs):
            if (job not in comparison.charted_jobs) is not faint:
                continue
            ink = "var(--faint)" if faint else f"var({colours[job]})"
            for place, axis in enumerate(axes):
                if job in axis.positions:
                    a, b = at(place, axis.positions[job])
                    rows.append(
                        {"x": a, "y": b, "o": place, "line": number, "tip": job.name, "c": ink}
                    )
        if rows:
            drawn = sheet.chart(rows).mark_line(
                strokeWidth=1 if faint else 2, opacity=1, strokeJoin="round"
            )
            layers.append(
                drawn.encode(
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
    layers += _axis_labels(sheet, axes, at, down, x, y)
    pads = (12, 12, 24, 20) if down else (8, 8 + last, 38, 10)
    return build_frame(sheet, layers, width, round(high), pads)


def _axis_labels(
    sheet: ChartSheet,
    axes: Sequence[CoordinateAxis],
    locate: Callable[[int, float], tuple[float, float]],
    is_vertical: bool,
    x: alt.X,
    y: alt.Y,
) -> list[alt.Chart]:
    """Returns names of axes and the texts at them, on a ground of the page's colour."""
    names: Rows = []
    texts: Rows = []
    for place, axis in enumerate(axes):
        a, b = locate(place, 0 if is_vertical else 1)
        names.append({"x": a, "y": b - (10 if is_vertical else 26), "t": axis.label})
        for share, text in axis.ticks:
            a, b = locate(place, share)
            spot = (a - share * len(text) * CHARACTER, b + 12) if is_vertical else (a + 6, b - 9)
            texts.append({"x": spot[0], "y": spot[1], "t": text})
    layers = []
    weights: tuple[tuple[Rows, str, Literal[600, 400]], ...] = (
        (names, INK, 600),
        (texts, GREY, 400),
    )
    for rows, colour, weight in weights:
        for ink, ground in ((PAGE, 4), (colour, 0)):
            mark = sheet.chart(rows).mark_text(
                align="left",
                baseline="middle",
                fontSize=12,
                fontWeight=weight,
                color=ink,
                stroke=PAGE if ground else "transparent",
                strokeWidth=ground,
                opacity=1,
            )
            layers.append(mark.encode(x=x, y=y, text="t:N"))
    return layers
