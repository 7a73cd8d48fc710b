"""Validation outcomes besides the loss: reward, accuracy and preference accuracy.

Each is compared with the untrained model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalewise.reports import charts, number_format
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import (
    ACCURACY,
    CHANCE_ACCURACY,
    MAX_CHARTED_JOBS,
    PREFERENCE_ACCURACY,
    REWARD,
    ReportJob,
    finite_series,
    lttb,
)
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel


@dataclass(frozen=True)
class ValidationOutcome:
    """A validation metric and its texts in the report."""

    key: str
    """Metric key."""
    anchor: str
    """Id of the section."""
    title: str
    """Topic of the section."""
    panel: str
    """Title of the chart."""
    unit: str
    """Unit or scope of the chart."""
    text: Callable[[float], str]
    """Number format."""
    points: str
    """Description of the chart for screen readers."""
    finding: str
    """Start of the heading, before the range of values."""


REWARDED = ValidationOutcome(
    REWARD,
    "rewarded",
    "Reward",
    "Validation reward",
    "mean over completions",
    "{:.3f}".format,
    "mean reward of greedy completions of validation prompts",
    "Validation reward is",
)
CLASSIFIED = ValidationOutcome(
    ACCURACY,
    "classified",
    "Classification accuracy",
    "Validation accuracy",
    "fraction of validation samples",
    number_format.format_percent,
    "fraction of validation samples classified correctly",
    "Validation accuracy is",
)


def outcome_section(outcome: ValidationOutcome, jobs: Sequence[ReportJob]) -> ReportSection | None:
    """Section of the metric over the steps; ``None`` if no job measured it."""
    curves = {job: _full_curve(outcome, job) for job in jobs}
    measured = {job: curve for job, curve in curves.items() if curve.steps}
    if not measured:
        return None
    lines = outcome_labels(measured, outcome.text)

    def draw(width: int) -> ChartDrawing:
        return charts.draw_curves(lines, width, side_note=max((it.label for it in lines), key=len))

    sentence = f"Points: {outcome.points}, over the steps."
    picture = draw_both_widths(draw, outcome.anchor, sentence)
    panel = ChartPanel(outcome.panel, outcome.unit, picture)
    return ReportSection(
        outcome.anchor,
        outcome.title,
        _finding_text(outcome, measured),
        (panel,),
        wandb_panels=(TitledPanel(outcome.panel, CurvesPanel((outcome.key,))),),
    )


def _full_curve(outcome: ValidationOutcome, job: ReportJob) -> MetricSeries:
    """Curve of a job, starting with the untrained model at step 0 if it was validated."""
    curve = finite_series(job.run.series.get(outcome.key, MetricSeries()))
    first = job.measured(f"{outcome.key}_first")
    if first is None or not curve.steps:
        return curve
    return MetricSeries((0, *curve.steps), (first, *curve.values))


def _finding_text(outcome: ValidationOutcome, curves: dict[ReportJob, MetricSeries]) -> str:
    ends = sorted(curve.values[-1] for curve in curves.values())
    values = number_format.format_range(outcome.text(ends[0]), outcome.text(ends[-1]))
    text = f"{outcome.finding} {values}"
    starts = [curve.values[0] for curve in curves.values() if curve.steps[0] == 0]
    if len(starts) < len(curves):
        return text
    lowest, highest = outcome.text(min(starts)), outcome.text(max(starts))
    return f"{text}, {number_format.format_range(lowest, highest)} before training"


UNTRAINED_NOTE = (
    "Before training, the model equals its reference model and rewards both completions equally: "
    "its preference accuracy is 50%."
)


def preference_section(jobs: Sequence[ReportJob]) -> ReportSection | None:
    """Section of the preference accuracy over the steps; ``None`` if no job measured it."""
    curves = {
        job: finite_series(job.run.series.get(PREFERENCE_ACCURACY, MetricSeries())) for job in jobs
    }
    measured = {job: curve for job, curve in curves.items() if curve.steps}
    if not measured:
        return None
    last = max(curve.steps[-1] for curve in measured.values())
    chance = CurveLine(
        ((0, CHANCE_ACCURACY), (last, CHANCE_ACCURACY)),
        f"untrained {number_format.format_percent(CHANCE_ACCURACY)}",
        tip="untrained",
        faint=True,
    )
    lines = [chance, *outcome_labels(measured, number_format.format_percent)]

    def draw(width: int) -> ChartDrawing:
        return charts.draw_curves(lines, width, side_note=max((it.label for it in lines), key=len))

    sentence = "Points: preference accuracy on validation pairs, over the steps."
    panel = ChartPanel(
        "Preference accuracy",
        "fraction of validation pairs",
        draw_both_widths(draw, "preferred", sentence),
    )
    return ReportSection(
        "preferred",
        "Preference accuracy",
        _preference_finding(measured),
        (panel,),
        notes=(UNTRAINED_NOTE,),
        wandb_panels=(TitledPanel("Preference accuracy", CurvesPanel((PREFERENCE_ACCURACY,))),),
    )


def outcome_labels(
    curves: Mapping[ReportJob, MetricSeries], format_label: Callable[[float], str]
) -> list[CurveLine]:
    """Curves of jobs, labeled with their formatted last values."""
    lines = []
    for job, curve in curves.items():
        sampled = lttb(curve, 60)
        name = f"{job.name} " if len(curves) > 1 else ""
        label = f"{name}{format_label(curve.values[-1])}" if len(curves) <= MAX_CHARTED_JOBS else ""
        points = tuple(zip(sampled.steps, sampled.values, strict=True))
        colors = (f"--c-{job.group}", f"--ct-{job.group}")
        lines.append(CurveLine(points, label, *colors, job.name, dots=True))
    return lines


def _preference_finding(curves: dict[ReportJob, MetricSeries]) -> str:
    ends = sorted(curve.values[-1] for curve in curves.values())
    span = number_format.format_range(
        number_format.format_percent(ends[0]), number_format.format_percent(ends[-1])
    )
    above = ends[0] > CHANCE_ACCURACY
    relation = "above" if above else "not above" if ends[-1] <= CHANCE_ACCURACY else "partly above"
    return f"Preference accuracy is {span}, {relation} the untrained model"
