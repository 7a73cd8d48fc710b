"""Preference accuracy on validation pairs, compared with the untrained model."""

from collections.abc import Callable, Mapping, Sequence

from scalewise.reports import charts, number_format
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import (
    CHANCE_ACCURACY,
    MAX_CHARTED_JOBS,
    PREFERENCE_ACCURACY,
    ReportJob,
    finite_series,
    lttb,
)
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, ReportSection
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel

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
        _finding_text(measured),
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


def _finding_text(curves: dict[ReportJob, MetricSeries]) -> str:
    ends = sorted(curve.values[-1] for curve in curves.values())
    span = number_format.format_range(
        number_format.format_percent(ends[0]), number_format.format_percent(ends[-1])
    )
    above = ends[0] > CHANCE_ACCURACY
    relation = "above" if above else "not above" if ends[-1] <= CHANCE_ACCURACY else "partly above"
    return f"Preference accuracy is {span}, {relation} the untrained model"
