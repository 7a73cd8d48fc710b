"""What jobs reach on held-out rows besides a loss, beside the model before it was trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalewise.reports import charts, numbers
from scalewise.reports.compare import ACCURACY, REWARD, Job, finite
from scalewise.reports.layout import Drawing, twice
from scalewise.reports.live import Curves, Drawn
from scalewise.reports.preferences import labelled
from scalewise.reports.records import Series
from scalewise.reports.sections import Panel, Section


@dataclass(frozen=True)
class Outcome:
    """A measure that validation logs, and the words for it."""

    key: str
    anchor: str
    title: str
    panel: str
    unit: str
    text: Callable[[float], str]
    points: str
    finding: str


REWARDED = Outcome(
    REWARD,
    "rewarded",
    "Rewards",
    "Held-out reward",
    "mean over answers",
    "{:.3f}".format,
    "mean reward of the likeliest answers to held-out prompts",
    "Held-out answers earn",
)
CLASSIFIED = Outcome(
    ACCURACY,
    "classified",
    "Classes",
    "Held-out accuracy",
    "share of held-out rows",
    numbers.percent,
    "share of held-out rows whose class is told rightly",
    "The class is right of held-out rows in",
)


def section(outcome: Outcome, jobs: Sequence[Job]) -> Section | None:
    """Returns the outcome over the steps; None where no job has it."""
    curves = {job: _whole(outcome, job) for job in jobs}
    known = {job: curve for job, curve in curves.items() if curve.steps}
    if not known:
        return None
    lines = labelled(known, outcome.text)

    def draw(width: int) -> Drawing:
        return charts.curves(lines, width, aside=max((it.label for it in lines), key=len))

    told = f"Points: {outcome.points}, over the steps."
    panel = Panel(outcome.panel, outcome.unit, twice(draw, outcome.anchor, told))
    return Section(outcome.anchor, outcome.title, _finding(outcome, known), (panel,),
                   live=(Drawn(outcome.panel, Curves((outcome.key,))),))  # fmt: skip


def _whole(outcome: Outcome, job: Job) -> Series:
    """Returns a job's curve, with the untrained model's point in front where it was validated."""
    curve = finite(job.run.series.get(outcome.key, Series()))
    first = job.measured(f"{outcome.key}_first")
    if first is None or not curve.steps:
        return curve
    return Series((0, *curve.steps), (first, *curve.values))


def _finding(outcome: Outcome, known: dict[Job, Series]) -> str:
    ends = sorted(curve.values[-1] for curve in known.values())
    said = f"{outcome.finding} {numbers.between(outcome.text(ends[0]), outcome.text(ends[-1]))}"
    starts = [curve.values[0] for curve in known.values() if curve.steps[0] == 0]
    if len(starts) < len(known):
        return said
    least, most = outcome.text(min(starts)), outcome.text(max(starts))
    return f"{said}, {numbers.between(least, most)} before training"
