"""Which jobs are worth having: step time against peak memory."""

from collections.abc import Sequence

from scalewise.reports import charts, headings, numbers
from scalewise.reports.charts import Mark
from scalewise.reports.compare import LOSS, PEAK, STEP, Comparison
from scalewise.reports.layout import twice
from scalewise.reports.numbers import MemoryUnit
from scalewise.reports.sections import Numbers, Panel, Section, left_out

SHAPES = ("circle", "diamond", "square", "triangle-up")


def trade(comparison: Comparison, unit: MemoryUnit) -> Section | None:
    """Returns step time against peak memory; ``None`` below three jobs that measured both."""
    jobs = [j for j in comparison.ranked(STEP, False) if j.measured(PEAK) is not None]
    if len(jobs) < 3:
        return None
    bins = _bins([number for job in jobs if (number := job.measured(LOSS)) is not None])
    shaped = comparison.group_key == "precision"
    marks = []
    for job in jobs:
        step, peak, end = (job.measured(key) or 0.0 for key in (STEP, PEAK, LOSS))
        colour = next((name for name, _, high in bins if end <= high), "--m-other")
        tip = f"{job.name}: {numbers.milliseconds(step)} ms, {unit.full(peak)}, loss {numbers.loss(job.measured(LOSS))}"
        marks.append(Mark(job.name, step * 1e3, peak / unit.size, colour,
                          SHAPES[job.group if shaped else 0], tip, job in comparison.front))  # fmt: skip
    title = "step time, ms (left is faster)"
    picture = twice(
        lambda width: charts.trade(marks, width, title),
        "trade",
        f"Points: step time against peak memory of {numbers.plural(len(jobs), 'job')}.",
    )
    key = [("", "loss"), *((name, label) for name, label, _ in bins)] if bins else []
    if shaped:
        key += [(SHAPES[place], name) for place, name in enumerate(comparison.groups)]
    notes = ("No other job beats those on the line on both time and memory. Names off the line are grey.",
             *left_out(comparison, jobs))  # fmt: skip
    rows = tuple(
        (j.name, (numbers.milliseconds(j.measured(STEP)), unit.text(j.measured(PEAK)),
                  numbers.loss(j.measured(LOSS)))) for j in jobs
    )  # fmt: skip
    return Section("trade", "Trade-off", headings.trade_heading(comparison),
                   (Panel(f"Peak memory, {unit.name}", "against step time; lower left is better", picture),),
                   tuple(key), notes, Numbers("", ("step, ms", f"peak, {unit.name}", "train loss"), rows))  # fmt: skip


def _bins(losses: Sequence[float]) -> list[tuple[str, str, float]]:
    """Returns up to four colours with a label and the largest loss each stands for."""
    order = sorted(losses)
    if not order:
        return []
    texts = list(dict.fromkeys(numbers.loss(number) for number in order))
    if len(texts) <= 4:
        return [(f"--q-{place}", text, max(n for n in order if numbers.loss(n) == text))
                for place, text in enumerate(texts)]  # fmt: skip
    cuts = [order[round((len(order) - 1) * part / 4)] for part in range(5)]
    return [(f"--q-{place}", numbers.between(numbers.loss(cuts[place]), numbers.loss(cuts[place + 1])),
             cuts[place + 1]) for place in range(4)]  # fmt: skip
