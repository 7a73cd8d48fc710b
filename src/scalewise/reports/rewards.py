"""What the answers of jobs earn on held-out prompts, beside the model before it was trained."""

from collections.abc import Sequence

from scalewise.reports import charts, numbers
from scalewise.reports.compare import REWARD, Job, finite
from scalewise.reports.layout import Drawing, twice
from scalewise.reports.live import Curves, Drawn
from scalewise.reports.preferences import labelled
from scalewise.reports.records import Series
from scalewise.reports.sections import Panel, Section


def section(jobs: Sequence[Job]) -> Section | None:
    """Returns the reward of the likeliest answers to held-out prompts, over the steps."""
    curves = {job: _whole(job) for job in jobs}
    known = {job: curve for job, curve in curves.items() if curve.steps}
    if not known:
        return None
    lines = labelled(known, "{:.3f}".format)

    def draw(width: int) -> Drawing:
        return charts.curves(lines, width, aside=max((it.label for it in lines), key=len))

    told = "Points: mean reward of the likeliest answers to held-out prompts, over the steps."
    panel = Panel("Held-out reward", "mean over answers", twice(draw, "rewarded", told))
    return Section("rewarded", "Rewards", _finding(known), (panel,),
                   live=(Drawn("Held-out reward", Curves((REWARD,))),))  # fmt: skip


def _whole(job: Job) -> Series:
    """Returns a job's curve, with the untrained model's point in front where it was validated."""
    curve, first = finite(job.run.series.get(REWARD, Series())), job.measured(f"{REWARD}_first")
    if first is None or not curve.steps:
        return curve
    return Series((0, *curve.steps), (first, *curve.values))


def _finding(known: dict[Job, Series]) -> str:
    ends = sorted(curve.values[-1] for curve in known.values())
    said = f"Held-out answers earn {numbers.between(f'{ends[0]:.3f}', f'{ends[-1]:.3f}')}"
    starts = [curve.values[0] for curve in known.values() if curve.steps[0] == 0]
    if len(starts) < len(known):
        return said
    least, most = f"{min(starts):.3f}", f"{max(starts):.3f}"
    return f"{said}, {numbers.between(least, most)} before training"
