"""Throughput over the steps of a run."""

from scalewise.reports import number_format, sections
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import SPEED, ReportJob, finite_series, lttb
from scalewise.reports.loss_curves import curves_panel
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ReportSection, window_note
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel


def throughput_section(job: ReportJob) -> ReportSection | None:
    """Throughput section of a run."""
    curve = finite_series(job.run.series.get(SPEED, MetricSeries()))
    if len(curve.steps) < 10:
        return None
    sampled = lttb(curve, 200)
    median, steps = job.measured(SPEED), window_note([job])
    window_text = f", {steps}" if steps else ""
    line = CurveLine(
        tuple(zip(sampled.steps, sampled.values, strict=True)), "", tip="tokens per second"
    )
    notes = (
        [f"Reported throughput: {number_format.format_whole(median)} tok/s{window_text}."]
        if median
        else []
    )
    return ReportSection(
        "throughput",
        "Throughput",
        sections.throughput_heading(curve.values),
        (
            curves_panel(
                "Tokens per second",
                "all ranks",
                [line],
                "speed",
                "Curve: tokens per second over the steps.",
                zero=True,
                height=150,
            ),
        ),
        notes=tuple(notes),
        wandb_panels=(
            TitledPanel("Tokens per second, all ranks", CurvesPanel((SPEED,), from_zero=True)),
        ),
    )
