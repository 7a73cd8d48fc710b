"""How often jobs prefer the better of two answers, beside the model before it was trained."""

from collections.abc import Sequence

from scalewise.reports import charts, numbers
from scalewise.reports.charts import Line
from scalewise.reports.compare import CHANCE, PREFERRED, SHOWN, Job, finite, lttb
from scalewise.reports.layout import Drawing, twice
from scalewise.reports.live import Curves, Drawn
from scalewise.reports.records import Series
from scalewise.reports.sections import Panel, Section

UNTRAINED = (
    "Before training a model rewards no answer above another, being its own reference: it is right "
    "in half of the pairs."
)


def section(jobs: Sequence[Job]) -> Section | None:
    """Returns the share of held-out pairs that are preferred rightly, over the steps."""
    curves = {job: finite(job.run.series.get(PREFERRED, Series())) for job in jobs}
    known = {job: curve for job, curve in curves.items() if curve.steps}
    if not known:
        return None
    last = max(curve.steps[-1] for curve in known.values())
    chance = Line(((0, CHANCE), (last, CHANCE)), f"untrained {numbers.percent(CHANCE)}",
                  tip="untrained", faint=True)  # fmt: skip
    lines = [chance, *(_line(job, curve, len(known)) for job, curve in known.items())]

    def draw(width: int) -> Drawing:
        return charts.curves(lines, width, aside=max((it.label for it in lines), key=len))

    told = "Points: share of held-out pairs that are preferred rightly, over the steps."
    panel = Panel("Preference accuracy", "share of held-out pairs", twice(draw, "preferred", told))
    return Section("preferred", "Preferences", _finding(known), (panel,), notes=(UNTRAINED,),
                   live=(Drawn("Preference accuracy", Curves((PREFERRED,))),))  # fmt: skip


def _line(job: Job, curve: Series, jobs: int) -> Line:
    kept = lttb(curve, 60)
    name = f"{job.name} " if jobs > 1 else ""
    label = f"{name}{numbers.percent(curve.values[-1])}" if jobs <= SHOWN else ""
    return Line(tuple(zip(kept.steps, kept.values, strict=True)), label, f"--c-{job.group}",
                f"--ct-{job.group}", job.name, dots=True)  # fmt: skip


def _finding(known: dict[Job, Series]) -> str:
    ends = sorted(curve.values[-1] for curve in known.values())
    span = numbers.between(numbers.percent(ends[0]), numbers.percent(ends[-1]))
    way = "more" if ends[0] > CHANCE else "not more" if ends[-1] <= CHANCE else "not always more"
    return f"Held-out pairs are preferred rightly in {span}, {way} than untrained"
