"""Pareto section: peak memory vs. step time, and loss vs. price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt

from scalewise.reports import number_format, sections
from scalewise.reports.chart_layout import (
    CHARACTER_WIDTH,
    GREY,
    INK,
    NARROW,
    ChartDrawing,
    ChartSheet,
    build_axis,
    build_frame,
    draw_both_widths,
    round_ticks,
)
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, ReportComparison, ReportJob
from scalewise.reports.loss_curves import loss_unit
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection, missing_jobs_note
from scalewise.reports.wandb_panels import ScatterPanel, SummaryNumber, TitledPanel


@dataclass(frozen=True)
class TradeoffMark:
    """A job in the scatter plot."""

    name: str
    """Label of the point."""
    x: float
    """Horizontal value."""
    y: float
    """Vertical value."""
    color: str
    """CSS variable."""
    shape: str
    """Vega shape."""
    tip: str
    """Tooltip."""
    front: bool
    """Whether the job is on the Pareto front."""


def draw_tradeoff(marks: Sequence[TradeoffMark], width: int, title: str) -> ChartDrawing:
    """Draw a scatter plot of two metrics to be minimized, with the Pareto front as a staircase."""
    sheet, narrow = ChartSheet(), width == NARROW
    left, right, height = 46, 16, 250 if narrow else 280
    bounds = []
    for ends, slack in (([m.x for m in marks], 0.16), ([m.y for m in marks], 0.14)):
        extent = (max(ends) - min(ends)) or max(ends) or 1
        bounds.append((max(min(ends) - slack * extent, 0), max(ends) + slack * extent))
    (x_low, x_high), (y_low, y_high) = bounds
    wide_scale = alt.Scale(domain=[x_low, x_high], nice=False, zero=False)
    tall_scale = alt.Scale(domain=[y_low, y_high], nice=False, zero=False)
    marks_x = round_ticks(x_low, x_high, 4 if narrow else 6)
    x = alt.X("x:Q", scale=wide_scale, axis=build_axis(marks_x, grid=False, title=title))
    y = alt.Y("y:Q", scale=tall_scale, axis=build_axis(round_ticks(y_low, y_high, 4), grid=True))
    front = sorted((m for m in marks if m.front), key=lambda m: m.x)
    staircase = [{"x": front[0].x, "y": y_high}, *({"x": m.x, "y": m.y} for m in front)]
    staircase.append({"x": x_high, "y": front[-1].y})
    line = sheet.chart(staircase).mark_line(
        interpolate="step-after", color=GREY, strokeWidth=1, opacity=1
    )
    rows = [{"x": m.x, "y": m.y, "c": f"var({m.color})", "s": m.shape, "tip": m.tip} for m in marks]
    spots = sheet.chart(rows).mark_point(filled=True, size=95, opacity=1, stroke=INK, strokeWidth=1)
    layers = [line.encode(x=x, y=y), spots.encode(
        x=x, y=y, fill=alt.Fill("c:N", scale=None, legend=None),
        shape=alt.Shape("s:N", scale=None, legend=None), description="tip:N")]  # fmt: skip
    inner = width - left - right
    occupied: list[tuple[float, float, float, float]] = []
    spans = [(m, (m.x - x_low) / (x_high - x_low) * inner,
              (y_high - m.y) / (y_high - y_low) * height) for m in marks]  # fmt: skip
    occupied += [(across - 6, down - 6, across + 6, down + 6) for _, across, down in spans]
    names: dict[tuple[bool, bool], list[dict[str, Any]]] = {}
    for mark, across, down in sorted(spans, key=lambda one: not one[0].front):
        offset = _place_label(mark, across, down, inner, occupied)
        if offset is not None:
            start, middle = across + offset[0], down + offset[1]
            row = {"x": x_low + start / inner * (x_high - x_low),
                  "y": y_high - middle / height * (y_high - y_low), "t": mark.name}  # fmt: skip
            names.setdefault((offset[0] < 0, mark.front), []).append(row)
    for (leftward, front_name), rows in names.items():
        text = sheet.chart(rows).mark_text(
            align="right" if leftward else "left", baseline="middle", fontSize=12,
            fontWeight=600 if front_name else 400, color=INK if front_name else GREY,
        )  # fmt: skip
        layers.append(text.encode(x=x, y=y, text="t:N"))
    return build_frame(sheet, layers, width, height, (left, right, 6, 38))


def _place_label(
    mark: TradeoffMark,
    across: float,
    down: float,
    inner: float,
    occupied: list[tuple[float, float, float, float]],
) -> tuple[int, int] | None:
    """Offset of a label from its point, and reserve its box; ``None`` if there is no room.

    Labels of the Pareto front go to the lower left, where no other job can be, and the others to
    the upper right. A negative horizontal offset is the right end of the label.
    """
    text_length = len(mark.name) * CHARACTER_WIDTH
    first = [(-9, 11), (9, 11)] if mark.front else [(9, -10), (-9, -10)]
    for dx, dy in [*first, *((a, -b) for a, b in first)]:
        start = across + dx - (text_length if dx < 0 else 0)
        box = (start, down + dy - 7, start + text_length, down + dy + 7)
        fits = start > -30 and start + text_length < inner + 16
        is_free = all(
            box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in occupied
        )
        if fits and is_free:
            occupied.append(box)
            return dx, dy
    return None


SHAPES = ("circle", "diamond", "square", "triangle-up")


@dataclass(frozen=True)
class TradeoffMeasure:
    """An axis of the scatter plot."""

    key: str
    """Metric key."""
    label: str
    """Name with unit."""
    scale: float
    """Factor from the metric's unit to the unit of the axis."""
    text: Callable[[float | None], str]
    """Number format."""


def tradeoff_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Pareto section; ``None`` if fewer than three jobs measured step time and peak memory.

    If the hardware profile has a price, loss vs. price is charted as well.
    """
    time = TradeoffMeasure(STEP, "step, ms", 1e3, number_format.format_milliseconds)
    peak = TradeoffMeasure(PEAK, f"peak, {unit.name}", 1 / unit.size, unit.text)
    price = TradeoffMeasure(PRICE, "$ per billion tokens", 1.0, number_format.format_price)
    loss = TradeoffMeasure(LOSS, "train loss", 1.0, number_format.format_loss)
    jobs = _measured_jobs(comparison, time, peak)
    if len(jobs) < 3:
        return None
    bins = color_bins([number for job in jobs if (number := job.measured(LOSS)) is not None])
    is_priced = (
        len({loss.text(j.measured(LOSS)) for j in _measured_jobs(comparison, price, loss)}) > 1
    )
    key = [("", "loss"), *((b.color, b.label) for b in bins)] if bins else []
    if comparison.group_key == "precision":
        key += [(SHAPES[index], name) for index, name in enumerate(comparison.groups)]
    panels = [
        _tradeoff_panel(
            comparison,
            (time, peak),
            bins,
            f"Peak memory, {unit.name}",
            "vs. step time; lower left is better",
            "step time, ms (left is faster)",
        )
    ]
    wandb_panels = [
        TitledPanel(
            "Peak memory vs. step time, colored by loss",
            ScatterPanel(SummaryNumber(STEP), SummaryNumber(PEAK), SummaryNumber(LOSS)),
        )
    ]
    if is_priced:
        panels.append(
            _tradeoff_panel(
                comparison,
                (price, loss),
                bins,
                f"Train loss, {loss_unit(jobs)}",
                "vs. price; lower left is better",
                "US dollars per billion tokens (left is cheaper)",
            )
        )
        wandb_panels.append(
            TitledPanel(
                "Loss vs. price per billion tokens, colored by peak memory",
                ScatterPanel(SummaryNumber(PRICE), SummaryNumber(LOSS), SummaryNumber(PEAK)),
            )
        )
    measures = (time, peak, *((price,) if is_priced else ()), loss)
    rows = ((job.name, tuple(m.text(job.measured(m.key)) for m in measures)) for job in jobs)
    return ReportSection(
        "tradeoff",
        "Memory vs. step time",
        sections.trade_heading(comparison),
        tuple(panels),
        tuple(key),
        tuple(missing_jobs_note(comparison, jobs)),
        NumbersTable("", tuple(measure.label for measure in measures), tuple(rows)),
        (
            "The line is the Pareto front: no other job is better on both axes. "
            "Other jobs have grey names.",
        ),
        wandb_panels=tuple(wandb_panels),
    )


def _measured_jobs(comparison: ReportComparison, *measures: TradeoffMeasure) -> list[ReportJob]:
    """Finished jobs that measured all ``measures``, sorted by the first."""
    jobs = comparison.rank_jobs(measures[0].key, False)
    return [job for job in jobs if all(job.measured(m.key) is not None for m in measures)]


def _tradeoff_panel(
    comparison: ReportComparison,
    measures: tuple[TradeoffMeasure, TradeoffMeasure],
    bins: Sequence["ColorBin"],
    title: str,
    detail: str,
    x_title: str,
) -> ChartPanel:
    """Scatter plot of the second measure vs. the first, with their Pareto front."""
    x, y = measures
    pareto_front, has_shapes = (
        comparison.find_pareto_front(x.key, y.key),
        comparison.group_key == "precision",
    )
    marks = []
    for job in _measured_jobs(comparison, x, y):
        loss, a, b = (job.measured(key) for key in (LOSS, x.key, y.key))
        color = next((s.color for s in bins if loss is not None and loss <= s.high), "--m-other")
        texts = [f"{m.label} {m.text(job.measured(m.key))}" for m in measures]
        if y.key != LOSS:
            texts.append(f"loss {number_format.format_loss(loss)}")
        marks.append(
            TradeoffMark(
                job.name,
                (a or 0) * x.scale,
                (b or 0) * y.scale,
                color,
                SHAPES[job.group if has_shapes else 0],
                f"{job.name}: {', '.join(texts)}",
                job in pareto_front,
            )
        )
    picture = draw_both_widths(
        lambda width: draw_tradeoff(marks, width, x_title),
        f"trade-{x.key.split('/')[0]}",
        f"Points: {y.label} vs. {x.label} of {number_format.pluralize(len(marks), 'job')}.",
    )
    return ChartPanel(title, detail, picture)


@dataclass(frozen=True)
class ColorBin:
    """A color of points or lines."""

    color: str
    """CSS variable."""
    label: str
    """Value or range of values."""
    high: float
    """Largest value with this color."""


def color_bins(
    values: Sequence[float], text: Callable[[float], str] = number_format.format_loss
) -> list[ColorBin]:
    """Up to four colors for ``values``, from lowest to highest."""
    order = sorted(values)
    texts = {text(number): number for number in order}
    if len(texts) <= 4:
        return [ColorBin(f"--q-{i}", label, high) for i, (label, high) in enumerate(texts.items())]
    cuts = [order[round((len(order) - 1) * part / 4)] for part in range(5)]
    spans = [number_format.format_range(text(a), text(b)) for a, b in pairwise(cuts)]
    return [ColorBin(f"--q-{i}", spans[i], cuts[i + 1]) for i in range(4)]
