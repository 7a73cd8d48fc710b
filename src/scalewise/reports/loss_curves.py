"""Training curves: loss, loss difference, gradient norm and learning rate."""

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from scalewise.metric_names import SOURCE_LOSS
from scalewise.reports import charts, number_format, sections, summary_sentences
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import (
    EQUIVALENCE_BOUND,
    LOSS,
    MAX_CHARTED_JOBS,
    UNTRAINED_LOSS,
    VALIDATION_LOSS,
    ReportComparison,
    ReportJob,
    finite_series,
    is_preference,
    loss_distance,
    lttb,
)
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel
from scalewise.units import format_count

NUM_COLORS = 4
"""Number of colors of curves in the style sheet."""
DEFAULT_LOSS_UNIT = "nats per token"
LOSS_UNITS = {
    "classification": "nats per sample",
    "dpo": "nats per pair",
    "grpo": "maximum reward minus reward",
    "module": "unit of the user-defined module",
}
"""Loss unit by objective, where it is not :data:`DEFAULT_LOSS_UNIT`."""


SIDE_CURVES = {
    "train/grad_norm": "Gradient norm",
    "train/skipped_steps": "Skipped optimizer steps",
    "train/lr": "Learning rate",
    "experts/max_load": "Load of the busiest expert, relative to the mean",
    "experts/min_load": "Load of the idlest expert, relative to the mean",
    "experts/router_entropy": "Router entropy, in nats",
    "experts/dropped": "Dropped pairs of a token and an expert",
}
"""Curves below the loss of a run, by metric, as far as measured."""


def loss_section(comparison: ReportComparison) -> ReportSection | None:
    """Loss section of a sweep: loss curves, and loss differences from the reference."""
    curves = _loss_curves(comparison, LOSS)
    if not curves:
        return None
    points = 200 if len(comparison.jobs) <= MAX_CHARTED_JOBS else 60
    finals = [curves[job].values[-1] for job in curves]
    lows, highs = zip(*((min(c.values), max(c.values)) for c in curves.values()), strict=True)
    distances = {
        job: distance for job in curves if (distance := loss_distance(job, comparison.reference))
    }
    largest = max((max(distance.values) for distance in distances.values()), default=0)
    is_overlapping = len(distances) == len(curves) - 1 > 0 and largest < 0.01 * (
        max(highs) - min(lows)
    )
    note = ""
    if is_overlapping:
        span = number_format.format_range(
            number_format.format_loss(min(finals)), number_format.format_loss(max(finals))
        )
        note = f"{len(curves)} jobs, {span}"
    charted = [job for job in curves if job in comparison.charted_jobs]
    side_note = max([note, *(f"{job.name} 0.0000" for job in charted)], key=len)

    def curve_lines(of: Mapping[ReportJob, MetricSeries], dots: bool = False) -> list[CurveLine]:
        named = [] if is_overlapping and not dots else charted
        return [
            _curve_line(
                job,
                curve,
                points,
                f"{job.name} {number_format.format_loss(curve.values[-1])}" if job in named else "",
                faint=job not in comparison.charted_jobs,
                dots=dots,
            )
            for job, curve in of.items()
        ]

    detail = f"{loss_unit(curves)}, {number_format.pluralize(len(curves), 'job')}"
    sentence = "Curves: train loss over the steps."
    panels = [
        curves_panel(
            "Train loss",
            detail,
            curve_lines(curves),
            "loss",
            sentence,
            note=note,
            side_note=side_note,
        )
    ]
    validation = _loss_curves(comparison, VALIDATION_LOSS)
    if validation:
        sentence = "Points: validation loss over the steps."
        points_lines = curve_lines(validation, dots=True)
        panels.append(
            curves_panel(
                "Validation loss",
                loss_unit(curves),
                points_lines,
                "val",
                sentence,
                side_note=side_note,
            )
        )
    distance_panels = _distance_curves(comparison, distances, points, side_note)
    panels += distance_panels
    notes: list[str | Markup] = []
    explanation: list[str | Markup] = []
    if is_overlapping and distance_panels:
        explanation.append(
            "The curves overlap at this scale; the loss difference shows how far apart they are."
        )
    if comparison.groups:
        names = [
            Markup('<b class="ct{}">{}</b>').format(index, name)
            for index, name in enumerate(comparison.groups)
        ]
        explanation.append(
            Markup("Color shows {}: {}.").format(
                comparison.group_key, summary_sentences.join_words(names)
            )
        )
    if distances:
        notes.append(
            "The loss difference is the absolute difference of train loss at the same step, labeled"
            " with its maximum. It compares single runs and does not measure the spread over seeds."
        )
    notes += data_notes(comparison.jobs)
    table = _loss_table({job: curves[job] for job in charted}) if charted else None
    finding = sections.loss_heading(comparison)
    return ReportSection(
        "loss",
        "Loss",
        finding,
        tuple(panels),
        (),
        tuple(notes),
        table,
        tuple(explanation),
        wandb_panels=_loss_panels(curves, validation),
    )


def _loss_panels(*curves: Mapping[ReportJob, MetricSeries]) -> tuple[TitledPanel, ...]:
    """W&B panels of train and validation loss, as far as measured."""
    kinds = ((LOSS, "Train loss"), (VALIDATION_LOSS, "Validation loss"))
    return tuple(
        TitledPanel(title, CurvesPanel((key,)))
        for (key, title), of in zip(kinds, curves, strict=True)
        if of
    )


def loss_unit(jobs: Iterable[ReportJob]) -> str:
    """Unit of the loss of the jobs' objective."""
    objectives = {str(job.run.choices.get("objective")) for job in jobs}
    if len(objectives) != 1:
        return DEFAULT_LOSS_UNIT
    return LOSS_UNITS.get(objectives.pop(), DEFAULT_LOSS_UNIT)


def _loss_curves(comparison: ReportComparison, key: str) -> dict[ReportJob, MetricSeries]:
    curves = {
        job: finite_series(job.run.series.get(key, MetricSeries())) for job in comparison.jobs
    }
    return {job: curve for job, curve in curves.items() if curve.steps}


def _curve_line(
    job: ReportJob,
    curve: MetricSeries,
    points: int,
    label: str,
    faint: bool = False,
    dots: bool = False,
) -> CurveLine:
    sampled = lttb(curve, points)
    return CurveLine(
        tuple(zip(sampled.steps, sampled.values, strict=True)),
        label,
        f"--c-{job.group}",
        f"--ct-{job.group}",
        job.name,
        faint,
        dots,
    )


def curves_panel(
    title: str,
    detail: str,
    lines: Sequence[CurveLine],
    anchor: str,
    sentence: str,
    *,
    note: str = "",
    side_note: str = "",
    log: bool = False,
    bound: float | None = None,
    zero: bool = False,
    height: int = 190,
) -> ChartPanel:
    """Panel of lines over the steps."""

    def draw(width: int) -> ChartDrawing:
        return charts.draw_curves(
            lines,
            width,
            log=log,
            bound=bound,
            zero=zero,
            note=note,
            side_note=side_note,
            height=height,
        )

    return ChartPanel(title, detail, draw_both_widths(draw, anchor, sentence))


def _distance_curves(
    comparison: ReportComparison,
    distances: Mapping[ReportJob, MetricSeries],
    points: int,
    side_note: str,
) -> list[ChartPanel]:
    lines = []
    for job, series in distances.items():
        pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v > 0]
        if pairs and job in comparison.charted_jobs:
            positive = MetricSeries(tuple(s for s, _ in pairs), tuple(v for _, v in pairs))
            label = f"{job.name} {number_format.format_power(max(positive.values))}"
            lines.append(_curve_line(job, positive, points, label))
    if not lines or comparison.reference is None:
        return []
    smallest = min(number for line in lines for _, number in line.points)
    title = f"Loss difference from {comparison.reference.name}"
    detail = "absolute difference of train loss, log scale"
    sentence = "Curves: loss difference of each job from the reference, log scale."
    bound = EQUIVALENCE_BOUND if smallest < 10 * EQUIVALENCE_BOUND else None
    return [
        curves_panel(
            title, detail, lines, "far", sentence, log=True, bound=bound, side_note=side_note
        )
    ]


def _loss_table(curves: Mapping[ReportJob, MetricSeries]) -> NumbersTable:
    last = max(curve.steps[-1] for curve in curves.values())
    first = min(curve.steps[0] for curve in curves.values())
    steps = sorted({round(first + (last - first) * part / 4) for part in range(5)})
    rows = []
    for job, curve in curves.items():
        loss_by_step = dict(zip(curve.steps, curve.values, strict=True))
        rows.append(
            (job.name, tuple(number_format.format_loss(loss_by_step.get(step)) for step in steps))
        )
    return NumbersTable("train loss", tuple(f"step {step:,}" for step in steps), tuple(rows))


def run_loss_section(job: ReportJob) -> ReportSection | None:
    """Loss section of a run, with gradient norm and learning rate."""
    series = {key: finite_series(curve) for key, curve in job.run.series.items()}
    train = series.get(LOSS, MetricSeries())
    if not train.steps:
        return None
    sampled = lttb(train, 200)
    lines = [
        CurveLine(
            tuple(zip(sampled.steps, sampled.values, strict=True)),
            f"train {number_format.format_loss(train.values[-1])}",
            tip="train loss",
        )
    ]
    validation = series.get(VALIDATION_LOSS, MetricSeries())
    if validation.steps:
        untrained = job.measured(UNTRAINED_LOSS)
        points = tuple(zip(validation.steps, validation.values, strict=True))
        start = ((0, untrained),) if untrained is not None else ()
        lines.append(
            CurveLine(
                (*start, *points),
                f"val {number_format.format_loss(validation.values[-1])}",
                "--c-1",
                "--ct-1",
                "validation loss",
                dots=True,
            )
        )
    title = "Train and validation loss" if validation.steps else "Train loss"
    side_note = max((line.label for line in lines), key=len)
    sentence = f"Curves: {title.lower()} over the steps."
    panels = [curves_panel(title, loss_unit([job]), lines, "loss", sentence)]
    loss_keys = (LOSS, VALIDATION_LOSS) if validation.steps else (LOSS,)
    wandb_panels = [TitledPanel(title, CurvesPanel(loss_keys))]
    if sources := {key: it for key, it in series.items() if key.startswith(SOURCE_LOSS)}:
        title = "Validation loss by source"
        panels.append(_source_panel(title, loss_unit([job]), sources))
        wandb_panels.append(TitledPanel(title, CurvesPanel(tuple(sources))))
    for key, title in SIDE_CURVES.items():
        curve = lttb(series.get(key, MetricSeries()), 200)
        if len(curve.steps) > 1:
            line = CurveLine(
                tuple(zip(curve.steps, curve.values, strict=True)), "", tip=title.lower()
            )
            sentence = f"Curve: {title.lower()} over the steps."
            anchor = key.split("/")[1]
            panels.append(
                curves_panel(
                    title, "", [line], anchor, sentence, side_note=side_note, zero=True, height=110
                )
            )
            wandb_panels.append(TitledPanel(title, CurvesPanel((key,), from_zero=True)))
    return ReportSection(
        "loss",
        "Loss",
        sections.loss_heading_of_one(job),
        tuple(panels),
        notes=(*_training_amount(job), *data_notes([job])),
        numbers=_loss_table({job: train}),
        wandb_panels=tuple(wandb_panels),
    )


def _source_panel(title: str, unit: str, sources: Mapping[str, MetricSeries]) -> ChartPanel:
    """Validation loss of each source of a mixture over the steps."""
    lines = []
    for number, (key, curve) in enumerate(sources.items()):
        name, color = key.removeprefix(SOURCE_LOSS), number % NUM_COLORS
        label = f"{name} {number_format.format_loss(curve.values[-1])}" if curve.values else name
        points = tuple(zip(curve.steps, curve.values, strict=True))
        lines.append(CurveLine(points, label, f"--c-{color}", f"--ct-{color}", name))
    side_note = max((line.label for line in lines), key=len)
    sentence = f"Curves: {title.lower()} over the steps."
    return curves_panel(title, unit, lines, "sources", sentence, side_note=side_note)


def _training_amount(job: ReportJob) -> tuple[str, ...]:
    """Note on model size, tokens and steps, as far as recorded."""
    summary = job.run.summary
    if summary is None or not summary.tokens or not summary.steps:
        return ()
    size = f"{format_count(summary.parameters)} parameters" if summary.parameters else "The run"
    unit = "pairs of 2 \u00d7" if is_preference([job]) else "samples of"
    batch = (
        f", {summary.global_batch:,} {unit} {summary.sequence:,} tokens per step"
        if summary.global_batch and summary.sequence
        else ""
    )
    steps = number_format.pluralize(summary.steps, "step")
    verb = "were trained" if summary.parameters else "trained"
    return (f"{size} {verb} on {summary.tokens:,} tokens in {steps}{batch}.",)


def data_notes(jobs: Sequence[ReportJob]) -> list[str | Markup]:
    """Distinct data notes, each with its jobs unless all jobs share it."""
    job_names: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.run.summary.notes if job.run.summary else ():
            job_names.setdefault(note, []).append(job.name)
    return [
        f"{number_format.capitalize_first(note)}."
        if len(names) == len(jobs)
        else Markup("{}: {}.").format(summary_sentences.join_words(names), note)
        for note, names in job_names.items()
    ]
