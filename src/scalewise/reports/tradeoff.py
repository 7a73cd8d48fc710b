"""Which jobs are worth having: step time against peak memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalewise.reports import charts, headings, numbers
from scalewise.reports.charts import Mark
from scalewise.reports.compare import LOSS, PEAK, STEP, Comparison
from scalewise.reports.layout import twice
from scalewise.reports.live import Drawn, Scatter, Summary
from scalewise.reports.numbers import MemoryUnit
from scalewise.reports.sections import Numbers, Panel, Section, left_out

SHAPES = ("circle", "diamond", "square", "triangle-up")


def trade(comparison: Comparison, unit: MemoryUnit) -> Section | None:
    """Returns step time against peak memory; ``None`` below three jobs that measured both."""
    jobs = [j for j in comparison.ranked(STEP, False) if j.measured(PEAK) is not None]
    if len(jobs) < 3:
        return None
    shades = bins([number for job in jobs if (number := job.measured(LOSS)) is not None])
    shaped = comparison.group_key == "precision"
    marks, rows = [], []
    for job in jobs:
        step, peak, end = job.measured(STEP) or 0, job.measured(PEAK) or 0, job.measured(LOSS)
        colour = next((b.colour for b in shades if end is not None and end <= b.high), "--m-other")
        texts = (numbers.milliseconds(step), unit.text(peak), numbers.loss(end))
        tip = f"{job.name}: {texts[0]} ms, {texts[1]} {unit.name}, loss {texts[2]}"
        shape = SHAPES[job.group if shaped else 0]
        front = job in comparison.front
        marks.append(Mark(job.name, step * 1e3, peak / unit.size, colour, shape, tip, front))
        rows.append((job.name, texts))
    picture = twice(
        lambda width: charts.trade(marks, width, "step time, ms (left is faster)"),
        "trade",
        f"Points: step time against peak memory of {numbers.plural(len(jobs), 'job')}.",
    )
    key = [("", "loss"), *((b.colour, b.label) for b in shades)] if shades else []
    if shaped:
        key += [(SHAPES[place], name) for place, name in enumerate(comparison.groups)]
    return Section(
        "trade",
        "Trade-off",
        headings.trade_heading(comparison),
        (Panel(f"Peak memory, {unit.name}", "against step time; lower left is better", picture),),
        tuple(key),
        tuple(left_out(comparison, jobs)),
        Numbers("", ("step, ms", f"peak, {unit.name}", "train loss"), tuple(rows)),
        (
            "No other job beats those on the line on both time and memory. "
            "Names off the line are grey.",
        ),
        live=(
            Drawn("Peak memory against step time, loss as colour",
                  Scatter(Summary(STEP), Summary(PEAK), Summary(LOSS))),
        ),
    )  # fmt: skip


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
