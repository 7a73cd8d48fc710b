"""Which jobs are worth having: step time against peak memory, loss against price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalewise.reports import charts, headings, numbers
from scalewise.reports.charts import Mark
from scalewise.reports.compare import LOSS, PEAK, PRICE, STEP, Comparison, Job
from scalewise.reports.layout import twice
from scalewise.reports.learning import unit_of_loss
from scalewise.reports.live import Drawn, Scatter, Summary
from scalewise.reports.numbers import MemoryUnit
from scalewise.reports.overview import dollars
from scalewise.reports.sections import Numbers, Panel, Section, left_out

SHAPES = ("circle", "diamond", "square", "triangle-up")


@dataclass(frozen=True)
class Measure:
    """One axis: its metric, how it is called, and how its numbers are scaled and written."""

    key: str
    label: str
    scale: float
    text: Callable[[float | None], str]


def trade(comparison: Comparison, unit: MemoryUnit) -> Section | None:
    """Returns step time against peak memory; ``None`` below three jobs that measured both.

    Where the hardware has a price, the loss against that of a billion tokens is drawn as well.
    """
    time = Measure(STEP, "step, ms", 1e3, numbers.milliseconds)
    peak = Measure(PEAK, f"peak, {unit.name}", 1 / unit.size, unit.text)
    price = Measure(PRICE, "$ a billion tokens", 1.0, dollars)
    loss = Measure(LOSS, "train loss", 1.0, numbers.loss)
    jobs = _having(comparison, time, peak)
    if len(jobs) < 3:
        return None
    shades = bins([number for job in jobs if (number := job.measured(LOSS)) is not None])
    priced = len({loss.text(j.measured(LOSS)) for j in _having(comparison, price, loss)}) > 1
    key = [("", "loss"), *((b.colour, b.label) for b in shades)] if shades else []
    if comparison.group_key == "precision":
        key += [(SHAPES[place], name) for place, name in enumerate(comparison.groups)]
    panels = [
        _panel(comparison, (time, peak), shades, f"Peak memory, {unit.name}",
               "against step time; lower left is better", "step time, ms (left is faster)")
    ]  # fmt: skip
    live = [Drawn("Peak memory against step time, loss as colour",
                  Scatter(Summary(STEP), Summary(PEAK), Summary(LOSS)))]  # fmt: skip
    if priced:
        panels.append(
            _panel(comparison, (price, loss), shades, f"Train loss, {unit_of_loss(jobs)}",
                   "against price; lower left is better",
                   "US dollars a billion tokens (left is cheaper)")
        )  # fmt: skip
        live.append(Drawn("Loss against price of a billion tokens, peak memory as colour",
                          Scatter(Summary(PRICE), Summary(LOSS), Summary(PEAK))))  # fmt: skip
    shown = (time, peak, *((price,) if priced else ()), loss)
    rows = ((job.name, tuple(m.text(job.measured(m.key)) for m in shown)) for job in jobs)
    return Section(
        "trade",
        "Trade-off",
        headings.trade_heading(comparison),
        tuple(panels),
        tuple(key),
        tuple(left_out(comparison, jobs)),
        Numbers("", tuple(measure.label for measure in shown), tuple(rows)),
        ("No other job beats those on a line on both of its numbers. Names off it are grey.",),
        live=tuple(live),
    )


def _having(comparison: Comparison, *measures: Measure) -> list[Job]:
    """Returns the finished jobs that measured all of them, in the order of the first."""
    jobs = comparison.ranked(measures[0].key, False)
    return [job for job in jobs if all(job.measured(m.key) is not None for m in measures)]


def _panel(
    comparison: Comparison,
    measures: tuple[Measure, Measure],
    shades: Sequence["Bin"],
    title: str,
    detail: str,
    across: str,
) -> Panel:
    """Returns the second of two measures against the first, with the front of both."""
    x, y = measures
    front, shaped = comparison.pareto(x.key, y.key), comparison.group_key == "precision"
    marks = []
    for job in _having(comparison, x, y):
        end, a, b = (job.measured(key) for key in (LOSS, x.key, y.key))
        colour = next((s.colour for s in shades if end is not None and end <= s.high), "--m-other")
        said = [f"{m.label} {m.text(job.measured(m.key))}" for m in measures]
        if y.key != LOSS:
            said.append(f"loss {numbers.loss(end)}")
        marks.append(Mark(job.name, (a or 0) * x.scale, (b or 0) * y.scale, colour,
                          SHAPES[job.group if shaped else 0], f"{job.name}: {', '.join(said)}",
                          job in front))  # fmt: skip
    picture = twice(
        lambda width: charts.trade(marks, width, across),
        f"trade-{x.key.split('/')[0]}",
        f"Points: {y.label} against {x.label} of {numbers.plural(len(marks), 'job')}.",
    )
    return Panel(title, detail, picture)


@dataclass(frozen=True)
class Bin:
    """One colour of points or lines: its label and the largest number it stands for."""

    colour: str
    label: str
    high: float


def bins(values: Sequence[float], text: Callable[[float], str] = numbers.loss) -> list[Bin]:
    """Returns up to four colours, from the lowest number to the highest."""
    order = sorted(values)
    texts = {text(number): number for number in order}
    if len(texts) <= 4:
        return [Bin(f"--q-{i}", said, high) for i, (said, high) in enumerate(texts.items())]
    cuts = [order[round((len(order) - 1) * part / 4)] for part in range(5)]
    spans = [numbers.between(text(a), text(b)) for a, b in pairwise(cuts)]
    return [Bin(f"--q-{i}", spans[i], cuts[i + 1]) for i in range(4)]
