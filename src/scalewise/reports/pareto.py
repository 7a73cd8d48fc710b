"""Pareto section: peak memory vs. step time, and loss vs. price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalewise.reports import number_format, sections
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, ReportComparison, ReportJob
from scalewise.reports.loss_curves import loss_unit
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection, missing_jobs_note
from scalewise.reports.summary_tables import format_price
from scalewise.reports.tradeoff_chart import TradeoffMark, draw_tradeoff
from scalewise.reports.wandb_panels import ScatterPanel, SummaryNumber, TitledPanel

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
    price = TradeoffMeasure(PRICE, "$ per billion tokens", 1.0, format_price)
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
