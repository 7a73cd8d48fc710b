"""What jobs reach on held-out rows besides a loss, beside the model before it was trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalewise.reports import charts, number_format
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.compare import ACCURACY, REWARD, ReportJob, finite_series
from scalewise.reports.preferences import outcome_labels
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel


@dataclass(frozen=True)
class ValidationOutcome:
    """A measure that validation logs, and the words for it."""

    key: str
    anchor: str
    title: str
    panel: str
    unit: str
    text: Callable[[float], str]
    points: str
    finding: str


REWARDED = ValidationOutcome(
    REWARD,
    "rewarded",
    "Rewards",
    "Held-out reward",
    "mean over answers",
    "{:.3f}".format,
    "mean reward of the likeliest answers to held-out prompts",
    "Held-out answers earn",
)
CLASSIFIED = ValidationOutcome(
    ACCURACY,
    "classified",
    "Classes",
    "Held-out accuracy",
    "share of held-out rows",
    number_format.format_percent,
    "share of held-out rows whose class is told rightly",
    "The class is right of held-out rows in",
)


def outcome_section(outcome: ValidationOutcome, jobs: Sequence[ReportJob]) -> ReportSection | None:
    """Returns the outcome over the steps; None where no job has it."""
    curves = {job: _full_curve(outcome, job) for job in jobs}
    known = {job: curve for job, curve in curves.items() if curve.steps}
    if not known:
        return None
    lines = outcome_labels(known, outcome.text)

    def draw(width: int) -> ChartDrawing:
        return charts.draw_curves(lines, width, side_note=max((it.label for it in lines), key=len))

    told = f"Points: {outcome.points}, over the steps."
    panel = ChartPanel(outcome.panel, outcome.unit, draw_both_widths(draw, outcome.anchor, told))
    return ReportSection(outcome.anchor, outcome.title, _finding_text(outcome, known), (panel,),
                   live=(TitledPanel(outcome.panel, CurvesPanel((outcome.key,))),))  # fmt: skip


def _full_curve(outcome: ValidationOutcome, job: ReportJob) -> MetricSeries:
    """Returns a job's curve, with the untrained model's point in front where it was validated."""
    curve = finite_series(job.run.series.get(outcome.key, MetricSeries()))
    first = job.measured(f"{outcome.key}_first")
    if first is None or not curve.steps:
        return curve
    return MetricSeries((0, *curve.steps), (first, *curve.values))


def _finding_text(outcome: ValidationOutcome, curves: dict[ReportJob, MetricSeries]) -> str:
    ends = sorted(curve.values[-1] for curve in curves.values())
    values = number_format.format_range(outcome.text(ends[0]), outcome.text(ends[-1]))
    said = f"{outcome.finding} {values}"
    starts = [curve.values[0] for curve in curves.values() if curve.steps[0] == 0]
    if len(starts) < len(curves):
        return said
    least, most = outcome.text(min(starts)), outcome.text(max(starts))
    return f"{said}, {number_format.format_range(least, most)} before training"
