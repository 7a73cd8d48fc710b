"""How often jobs prefer the better of two answers, beside the model before it was trained."""

from collections.abc import Callable, Mapping, Sequence

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
    lines = [chance, *labelled(known, numbers.percent)]

    def draw(width: int) -> Drawing:
        return charts.curves(lines, width, aside=max((it.label for it in lines), key=len))

    told = "Points: share of held-out pairs that are preferred rightly, over the steps."
    panel = Panel("Preference accuracy", "share of held-out pairs", twice(draw, "preferred", told))
    return Section("preferred", "Preferences", _finding(known), (panel,), notes=(UNTRAINED,),
                   live=(Drawn("Preference accuracy", Curves((PREFERRED,))),))  # fmt: skip


def labelled(known: Mapping[Job, Series], told: Callable[[float], str]) -> list[Line]:
    """Returns the lines of jobs, with what is ``told`` of their ends beside them."""
    lines = []
    for job, curve in known.items():
        kept = lttb(curve, 60)
        name = f"{job.name} " if len(known) > 1 else ""
        label = f"{name}{told(curve.values[-1])}" if len(known) <= SHOWN else ""
        points = tuple(zip(kept.steps, kept.values, strict=True))
        colours = (f"--c-{job.group}", f"--ct-{job.group}")
        lines.append(Line(points, label, *colours, job.name, dots=True))
    return lines


def _finding(known: dict[Job, Series]) -> str:
    ends = sorted(curve.values[-1] for curve in known.values())
    span = numbers.between(numbers.percent(ends[0]), numbers.percent(ends[-1]))
    way = "more" if ends[0] > CHANCE else "not more" if ends[-1] <= CHANCE else "not always more"
    return f"Held-out pairs are preferred rightly in {span}, {way} than untrained"
