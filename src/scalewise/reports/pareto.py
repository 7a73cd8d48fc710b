"""Which jobs are worth having: step time against peak memory, loss against price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalewise.reports import charts, number_format, section_titles
from scalewise.reports.chart_layout import draw_both_widths
from scalewise.reports.charts import TradeoffMark
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, ReportComparison, ReportJob
from scalewise.reports.loss_curves import loss_unit
from scalewise.reports.number_format import MemoryUnit
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection, left_out_note
from scalewise.reports.summary_tables import format_price
from scalewise.reports.wandb_panels import ScatterPanel, SummaryNumber, TitledPanel

SHAPES = ("circle", "diamond", "square", "triangle-up")


@dataclass(frozen=True)
class TradeoffMeasure:
    """One axis: its metric, how it is called, and how its numbers are scaled and written."""

    key: str
    label: str
    scale: float
    text: Callable[[float | None], str]


def tradeoff_section(comparison: ReportComparison, unit: MemoryUnit) -> ReportSection | None:
    """Returns step time against peak memory; ``None`` below three jobs that measured both.

    Where the hardware has a price, the loss against that of a billion tokens is drawn as well.
    """
    time = TradeoffMeasure(STEP, "step, ms", 1e3, number_format.format_milliseconds)
    peak = TradeoffMeasure(PEAK, f"peak, {unit.name}", 1 / unit.size, unit.text)
    price = TradeoffMeasure(PRICE, "$ a billion tokens", 1.0, format_price)
    loss = TradeoffMeasure(LOSS, "train loss", 1.0, number_format.format_loss)
    jobs = _measured_jobs(comparison, time, peak)
    if len(jobs) < 3:
        return None
    shades = color_bins([number for job in jobs if (number := job.measured(LOSS)) is not None])
    priced = len({loss.text(j.measured(LOSS)) for j in _measured_jobs(comparison, price, loss)}) > 1
    key = [("", "loss"), *((b.colour, b.label) for b in shades)] if shades else []
    if comparison.group_key == "precision":
        key += [(SHAPES[place], name) for place, name in enumerate(comparison.groups)]
    panels = [
        _tradeoff_panel(
            comparison,
            (time, peak),
            shades,
            f"Peak memory, {unit.name}",
            "against step time; lower left is better",
            "step time, ms (left is faster)",
        )
    ]
    live = [
        TitledPanel(
            "Peak memory against step time, loss as colour",
            ScatterPanel(SummaryNumber(STEP), SummaryNumber(PEAK), SummaryNumber(LOSS)),
        )
    ]
    if priced:
        panels.append(
            _tradeoff_panel(
                comparison,
                (price, loss),
                shades,
                f"Train loss, {loss_unit(jobs)}",
                "against price; lower left is better",
                "US dollars a billion tokens (left is cheaper)",
            )
        )
        live.append(
            TitledPanel(
                "Loss against price of a billion tokens, peak memory as colour",
                ScatterPanel(SummaryNumber(PRICE), SummaryNumber(LOSS), SummaryNumber(PEAK)),
            )
        )
    shown = (time, peak, *((price,) if priced else ()), loss)
    rows = ((job.name, tuple(m.text(job.measured(m.key)) for m in shown)) for job in jobs)
    return ReportSection(
        "trade",
        "Trade-off",
        section_titles.trade_heading(comparison),
        tuple(panels),
        tuple(key),
        tuple(left_out_note(comparison, jobs)),
        NumbersTable("", tuple(measure.label for measure in shown), tuple(rows)),
        ("No other job beats those on a line on both of its numbers. Names off it are grey.",),
        live=tuple(live),
    )


def _measured_jobs(comparison: ReportComparison, *measures: TradeoffMeasure) -> list[ReportJob]:
    """Returns the finished jobs that measured all of them, in the order of the first."""
    jobs = comparison.rank_jobs(measures[0].key, False)
    return [job for job in jobs if all(job.measured(m.key) is not None for m in measures)]


def _tradeoff_panel(
    comparison: ReportComparison,
    measures: tuple[TradeoffMeasure, TradeoffMeasure],
    shades: Sequence["ColorBin"],
    title: str,
    detail: str,
    across: str,
) -> ChartPanel:
    """Returns the second of two measures against the first, with the front of both."""
    x, y = measures
    front, shaped = comparison.find_pareto_front(x.key, y.key), comparison.group_key == "precision"
    marks = []
    for job in _measured_jobs(comparison, x, y):
        end, a, b = (job.measured(key) for key in (LOSS, x.key, y.key))
        colour = next((s.colour for s in shades if end is not None and end <= s.high), "--m-other")
        said = [f"{m.label} {m.text(job.measured(m.key))}" for m in measures]
        if y.key != LOSS:
            said.append(f"loss {number_format.format_loss(end)}")
        marks.append(
            TradeoffMark(
                job.name,
                (a or 0) * x.scale,
                (b or 0) * y.scale,
                colour,
                SHAPES[job.group if shaped else 0],
                f"{job.name}: {', '.join(said)}",
                job in front,
            )
        )
    picture = draw_both_widths(
        lambda width: charts.draw_tradeoff(marks, width, across),
        f"trade-{x.key.split('/')[0]}",
        f"Points: {y.label} against {x.label} of {number_format.pluralize(len(marks), 'job')}.",
    )
    return ChartPanel(title, detail, picture)


@dataclass(frozen=True)
class ColorBin:
    """One colour of points or lines: its label and the largest number it stands for."""

    colour: str
    label: str
    high: float


def color_bins(
    values: Sequence[float], text: Callable[[float], str] = number_format.format_loss
) -> list[ColorBin]:
    """Returns up to four colours, from the lowest number to the highest."""
    order = sorted(values)
    texts = {text(number): number for number in order}
    if len(texts) <= 4:
        return [ColorBin(f"--q-{i}", said, high) for i, (said, high) in enumerate(texts.items())]
    cuts = [order[round((len(order) - 1) * part / 4)] for part in range(5)]
    spans = [number_format.format_range(text(a), text(b)) for a, b in pairwise(cuts)]
    return [ColorBin(f"--q-{i}", spans[i], cuts[i + 1]) for i in range(4)]
