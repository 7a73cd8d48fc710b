"""What the jobs learned, over the steps: losses, distances, norms, rates and throughput."""

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from scalewise.reports import charts, number_format, section_titles, summary_sentences
from scalewise.reports.chart_layout import ChartDrawing, draw_both_widths
from scalewise.reports.charts import CurveLine
from scalewise.reports.compare import (
    EQUIVALENT,
    LOSS,
    SHOWN,
    SPEED,
    UNTRAINED,
    VALIDATION,
    ReportComparison,
    ReportJob,
    finite_series,
    is_preference,
    loss_distance,
    lttb,
)
from scalewise.reports.records import MetricSeries
from scalewise.reports.sections import ChartPanel, NumbersTable, ReportSection, window_note
from scalewise.reports.wandb_panels import CurvesPanel, TitledPanel
from scalewise.units import format_count

NATS = "nats per token"
UNITS = {
    "classification": "nats per row",
    "dpo": "nats per pair",
    "grpo": "what answers lack of the whole reward",
    "module": "as the module returns it",
}
"""What the loss of other objectives is told in."""


def loss_section(comparison: ReportComparison) -> ReportSection | None:
    """Returns the loss of all jobs and how far each is from the reference."""
    curves = _loss_curves(comparison, LOSS)
    if not curves:
        return None
    points = 200 if len(comparison.jobs) <= SHOWN else 60
    finals = [curves[job].values[-1] for job in curves]
    lows, highs = zip(*((min(c.values), max(c.values)) for c in curves.values()), strict=True)
    far = {job: found for job in curves if (found := loss_distance(job, comparison.reference))}
    spread = max((max(found.values) for found in far.values()), default=0)
    same = len(far) == len(curves) - 1 > 0 and spread < 0.01 * (max(highs) - min(lows))
    note = ""
    if same:
        span = number_format.format_range(
            number_format.format_loss(min(finals)), number_format.format_loss(max(finals))
        )
        note = f"{len(curves)} jobs, {span}"
    drawn = [job for job in curves if job in comparison.charted_jobs]
    aside = max([note, *(f"{job.name} 0.0000" for job in drawn)], key=len)

    def ends(of: Mapping[ReportJob, MetricSeries], dots: bool = False) -> list[CurveLine]:
        named = [] if same and not dots else drawn
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
    told = "Curves: train loss over the steps."
    panels = [
        _curve_lines("Train loss", detail, ends(curves), "loss", told, note=note, side_note=aside)
    ]
    validation = _loss_curves(comparison, VALIDATION)
    if validation:
        told = "Points: validation loss over the steps."
        checks = ends(validation, dots=True)
        panels.append(
            _curve_lines("Validation loss", loss_unit(curves), checks, "val", told, side_note=aside)
        )
    distances = _distance_curves(comparison, far, points, aside)
    panels += distances
    notes: list[str | Markup] = []
    reading: list[str | Markup] = []
    if same and distances:
        reading.append(
            "The curves cannot be told apart by eye: the panel of distances shows what is left."
        )
    if comparison.groups:
        names = [
            Markup('<b class="ct{}">{}</b>').format(place, name)
            for place, name in enumerate(comparison.groups)
        ]
        reading.append(
            Markup("Colour is {}: {}.").format(
                comparison.group_key, summary_sentences.join_words(names)
            )
        )
    if far:
        notes.append(
            "Distance is the absolute difference of train loss at the same step; the number is the "
            "largest. It compares single runs and says nothing of the spread between seeds."
        )
    notes += data_notes(comparison.jobs)
    table = _loss_table({job: curves[job] for job in drawn}) if drawn else None
    finding = section_titles.loss_heading(comparison)
    return ReportSection(
        "loss",
        "Loss",
        finding,
        tuple(panels),
        (),
        tuple(notes),
        table,
        tuple(reading),
        live=_loss_panels(curves, validation),
    )


def _loss_panels(*shown: Mapping[ReportJob, MetricSeries]) -> tuple[TitledPanel, ...]:
    """Returns the panels of train and of validation loss, as far as there are any."""
    kinds = ((LOSS, "Train loss"), (VALIDATION, "Validation loss"))
    return tuple(
        TitledPanel(title, CurvesPanel((key,)))
        for (key, title), of in zip(kinds, shown, strict=True)
        if of
    )


def loss_unit(jobs: Iterable[ReportJob]) -> str:
    """Returns what the loss of jobs of one objective is told in."""
    objectives = {str(job.run.choices.get("objective")) for job in jobs}
    return UNITS.get(objectives.pop(), NATS) if len(objectives) == 1 else NATS


def _loss_curves(comparison: ReportComparison, key: str) -> dict[ReportJob, MetricSeries]:
    found = {job: finite_series(job.run.series.get(key, MetricSeries())) for job in comparison.jobs}
    return {job: curve for job, curve in found.items() if curve.steps}


def _curve_line(
    job: ReportJob,
    curve: MetricSeries,
    points: int,
    label: str,
    faint: bool = False,
    dots: bool = False,
) -> CurveLine:
    kept = lttb(curve, points)
    return CurveLine(
        tuple(zip(kept.steps, kept.values, strict=True)),
        label,
        f"--c-{job.group}",
        f"--ct-{job.group}",
        job.name,
        faint,
        dots,
    )


def _curve_lines(
    title: str,
    detail: str,
    lines: Sequence[CurveLine],
    ident: str,
    sentence: str,
    *,
    note: str = "",
    side_note: str = "",
    log: bool = False,
    bound: float | None = None,
    zero: bool = False,
    height: int = 190,
) -> ChartPanel:
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

    return ChartPanel(title, detail, draw_both_widths(draw, ident, sentence))


def _distance_curves(
    comparison: ReportComparison,
    distances: Mapping[ReportJob, MetricSeries],
    points: int,
    side_note: str,
) -> list[ChartPanel]:
    lines = []
    for job, found in distances.items():
        kept = [(s, v) for s, v in zip(found.steps, found.values, strict=True) if v > 0]
        if kept and job in comparison.charted_jobs:
            clean = MetricSeries(tuple(s for s, _ in kept), tuple(v for _, v in kept))
            label = f"{job.name} {number_format.format_power(max(clean.values))}"
            lines.append(_curve_line(job, clean, points, label))
    if not lines or comparison.reference is None:
        return []
    least = min(number for line in lines for _, number in line.points)
    title = f"Distance from {comparison.reference.name}"
    detail = "absolute difference of train loss, log scale"
    told = "Curves: distance of each job's loss from the reference, on a log scale."
    bound = EQUIVALENT if least < 10 * EQUIVALENT else None
    return [
        _curve_lines(title, detail, lines, "far", told, log=True, bound=bound, side_note=side_note)
    ]


def _loss_table(curves: Mapping[ReportJob, MetricSeries]) -> NumbersTable:
    last = max(curve.steps[-1] for curve in curves.values())
    first = min(curve.steps[0] for curve in curves.values())
    steps = sorted({round(first + (last - first) * part / 4) for part in range(5)})
    rows = []
    for job, curve in curves.items():
        known = dict(zip(curve.steps, curve.values, strict=True))
        rows.append((job.name, tuple(number_format.format_loss(known.get(step)) for step in steps)))
    return NumbersTable("train loss", tuple(f"step {step:,}" for step in steps), tuple(rows))


def run_loss_section(job: ReportJob) -> ReportSection | None:
    """Returns a run's losses with its gradient norm and learning rate below them."""
    series = {key: finite_series(curve) for key, curve in job.run.series.items()}
    train = series.get(LOSS, MetricSeries())
    if not train.steps:
        return None
    drawn = lttb(train, 200)
    lines = [
        CurveLine(
            tuple(zip(drawn.steps, drawn.values, strict=True)),
            f"train {number_format.format_loss(train.values[-1])}",
            tip="train loss",
        )
    ]
    check = series.get(VALIDATION, MetricSeries())
    if check.steps:
        untrained = job.measured(UNTRAINED)
        points = tuple(zip(check.steps, check.values, strict=True))
        begins = ((0, untrained),) if untrained is not None else ()
        lines.append(
            CurveLine(
                (*begins, *points),
                f"val {number_format.format_loss(check.values[-1])}",
                "--c-1",
                "--ct-1",
                "validation loss",
                dots=True,
            )
        )
    what = "Train and validation loss" if check.steps else "Train loss"
    aside = max((line.label for line in lines), key=len)
    told = f"Curves: {what.lower()} over the steps."
    panels = [_curve_lines(what, loss_unit([job]), lines, "loss", told)]
    live = [TitledPanel(what, CurvesPanel((LOSS, VALIDATION) if check.steps else (LOSS,)))]
    for key, title in (("train/grad_norm", "Gradient norm"), ("train/lr", "Learning rate")):
        curve = lttb(series.get(key, MetricSeries()), 200)
        if len(curve.steps) > 1:
            line = CurveLine(
                tuple(zip(curve.steps, curve.values, strict=True)), "", tip=title.lower()
            )
            told = f"Curve: {title.lower()} over the steps."
            ident = key.split("/")[1]
            panels.append(
                _curve_lines(title, "", [line], ident, told, side_note=aside, zero=True, height=110)
            )
            live.append(TitledPanel(title, CurvesPanel((key,), from_zero=True)))
    return ReportSection(
        "loss",
        "Loss",
        section_titles.loss_heading_of_one(job),
        tuple(panels),
        notes=(*_training_amount(job), *data_notes([job])),
        numbers=_loss_table({job: train}),
        live=tuple(live),
    )


def _training_amount(job: ReportJob) -> tuple[str, ...]:
    """Returns a note on how much the run saw, as far as it recorded it."""
    ended = job.run.summary
    if ended is None or not ended.tokens or not ended.steps:
        return ()
    size = f" {format_count(ended.parameters)} parameters" if ended.parameters else " The run"
    rows = "pairs of twice" if is_preference([job]) else "rows of"
    batch = (
        f", {ended.global_batch:,} {rows} {ended.sequence:,} tokens a step"
        if ended.global_batch and ended.sequence
        else ""
    )
    steps = number_format.pluralize(ended.steps, "step")
    return (f"{size.strip()} saw {ended.tokens:,} tokens in {steps}{batch}.",)


def data_notes(jobs: Sequence[ReportJob]) -> list[str | Markup]:
    """Returns the notes about the data, each once, with the jobs where not all have it."""
    having: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.run.summary.notes if job.run.summary else ():
            having.setdefault(note, []).append(job.name)
    return [
        f"{number_format.capitalize_first(note)}."
        if len(names) == len(jobs)
        else Markup("{}: {}.").format(summary_sentences.join_words(names), note)
        for note, names in having.items()
    ]


def throughput_section(job: ReportJob) -> ReportSection | None:
    """Returns a run's tokens per second over the steps."""
    curve = finite_series(job.run.series.get(SPEED, MetricSeries()))
    if len(curve.steps) < 10:
        return None
    kept = lttb(curve, 200)
    median, steps = job.measured(SPEED), window_note([job])
    over = f", {steps}" if steps else ""
    line = CurveLine(tuple(zip(kept.steps, kept.values, strict=True)), "", tip="tokens per second")
    notes = (
        [f"The summary's number is {number_format.format_whole(median)} tok/s{over}."]
        if median
        else []
    )
    return ReportSection(
        "throughput",
        "Throughput",
        section_titles.throughput_heading(curve.values),
        (
            _curve_lines(
                "Tokens per second",
                "all ranks together",
                [line],
                "speed",
                "Curve: tokens per second over the steps.",
                zero=True,
                height=150,
            ),
        ),
        notes=tuple(notes),
        live=(TitledPanel("Tokens/s of all ranks", CurvesPanel((SPEED,), from_zero=True)),),
    )
