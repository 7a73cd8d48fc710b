"""What the jobs learned, over the steps: losses, distances, norms, rates and throughput."""

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from scalewise.reports import charts, findings, headings, numbers
from scalewise.reports.charts import Line
from scalewise.reports.compare import (
    EQUIVALENT,
    LOSS,
    SHOWN,
    SPEED,
    UNTRAINED,
    VALIDATION,
    Comparison,
    Job,
    distance,
    finite,
    lttb,
    prefers,
)
from scalewise.reports.layout import Drawing, twice
from scalewise.reports.live import Curves, Drawn
from scalewise.reports.records import Series
from scalewise.reports.sections import Numbers, Panel, Section, window
from scalewise.units import count_text

NATS = "nats per token"
UNITS = {
    "classification": "nats per row",
    "dpo": "nats per pair",
    "grpo": "what answers lack of the whole reward",
    "module": "as the module returns it",
}
"""What the loss of other objectives is told in."""


def loss(comparison: Comparison) -> Section | None:
    """Returns the loss of all jobs and how far each is from the reference."""
    curves = _curves(comparison, LOSS)
    if not curves:
        return None
    points = 200 if len(comparison.jobs) <= SHOWN else 60
    finals = [curves[job].values[-1] for job in curves]
    lows, highs = zip(*((min(c.values), max(c.values)) for c in curves.values()), strict=True)
    far = {job: found for job in curves if (found := distance(job, comparison.reference))}
    spread = max((max(found.values) for found in far.values()), default=0)
    same = len(far) == len(curves) - 1 > 0 and spread < 0.01 * (max(highs) - min(lows))
    note = ""
    if same:
        span = numbers.between(numbers.loss(min(finals)), numbers.loss(max(finals)))
        note = f"{len(curves)} jobs, {span}"
    drawn = [job for job in curves if job in comparison.shown]
    aside = max([note, *(f"{job.name} 0.0000" for job in drawn)], key=len)

    def ends(of: Mapping[Job, Series], dots: bool = False) -> list[Line]:
        named = [] if same and not dots else drawn
        return [
            _line(
                job,
                curve,
                points,
                f"{job.name} {numbers.loss(curve.values[-1])}" if job in named else "",
                faint=job not in comparison.shown,
                dots=dots,
            )
            for job, curve in of.items()
        ]

    detail = f"{unit_of_loss(curves)}, {numbers.plural(len(curves), 'job')}"
    told = "Curves: train loss over the steps."
    panels = [_lines("Train loss", detail, ends(curves), "loss", told, note=note, aside=aside)]
    validation = _curves(comparison, VALIDATION)
    if validation:
        told = "Points: validation loss over the steps."
        checks = ends(validation, dots=True)
        panels.append(
            _lines("Validation loss", unit_of_loss(curves), checks, "val", told, aside=aside)
        )
    distances = _distances(comparison, far, points, aside)
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
            Markup("Colour is {}: {}.").format(comparison.group_key, findings.listed(names))
        )
    if far:
        notes.append(
            "Distance is the absolute difference of train loss at the same step; the number is the "
            "largest. It compares single runs and says nothing of the spread between seeds."
        )
    notes += data_notes(comparison.jobs)
    table = _loss_numbers({job: curves[job] for job in drawn}) if drawn else None
    finding = headings.loss_heading(comparison)
    return Section("loss", "Loss", finding, tuple(panels), (), tuple(notes), table,
                   tuple(reading), live=_live(curves, validation))  # fmt: skip


def _live(*shown: Mapping[Job, Series]) -> tuple[Drawn, ...]:
    """Returns the panels of train and of validation loss, as far as there are any."""
    kinds = ((LOSS, "Train loss"), (VALIDATION, "Validation loss"))
    return tuple(
        Drawn(title, Curves((key,))) for (key, title), of in zip(kinds, shown, strict=True) if of
    )


def unit_of_loss(jobs: Iterable[Job]) -> str:
    """Returns what the loss of jobs of one objective is told in."""
    objectives = {str(job.run.choices.get("objective")) for job in jobs}
    return UNITS.get(objectives.pop(), NATS) if len(objectives) == 1 else NATS


def _curves(comparison: Comparison, key: str) -> dict[Job, Series]:
    found = {job: finite(job.run.series.get(key, Series())) for job in comparison.jobs}
    return {job: curve for job, curve in found.items() if curve.steps}


def _line(
    job: Job, curve: Series, points: int, label: str, faint: bool = False, dots: bool = False
) -> Line:
    kept = lttb(curve, points)
    return Line(tuple(zip(kept.steps, kept.values, strict=True)), label, f"--c-{job.group}",
                f"--ct-{job.group}", job.name, faint, dots)  # fmt: skip


def _lines(
    title: str,
    detail: str,
    lines: Sequence[Line],
    ident: str,
    sentence: str,
    *,
    note: str = "",
    aside: str = "",
    log: bool = False,
    bound: float | None = None,
    zero: bool = False,
    height: int = 190,
) -> Panel:
    def draw(width: int) -> Drawing:
        return charts.curves(
            lines, width, log=log, bound=bound, zero=zero, note=note, aside=aside, height=height
        )

    return Panel(title, detail, twice(draw, ident, sentence))


def _distances(
    comparison: Comparison, far: Mapping[Job, Series], points: int, aside: str
) -> list[Panel]:
    lines = []
    for job, found in far.items():
        kept = [(s, v) for s, v in zip(found.steps, found.values, strict=True) if v > 0]
        if kept and job in comparison.shown:
            clean = Series(tuple(s for s, _ in kept), tuple(v for _, v in kept))
            label = f"{job.name} {numbers.power(max(clean.values))}"
            lines.append(_line(job, clean, points, label))
    if not lines or comparison.reference is None:
        return []
    least = min(number for line in lines for _, number in line.points)
    title = f"Distance from {comparison.reference.name}"
    detail = "absolute difference of train loss, log scale"
    told = "Curves: distance of each job's loss from the reference, on a log scale."
    bound = EQUIVALENT if least < 10 * EQUIVALENT else None
    return [_lines(title, detail, lines, "far", told, log=True, bound=bound, aside=aside)]


def _loss_numbers(curves: Mapping[Job, Series]) -> Numbers:
    last = max(curve.steps[-1] for curve in curves.values())
    first = min(curve.steps[0] for curve in curves.values())
    steps = sorted({round(first + (last - first) * part / 4) for part in range(5)})
    rows = []
    for job, curve in curves.items():
        known = dict(zip(curve.steps, curve.values, strict=True))
        rows.append((job.name, tuple(numbers.loss(known.get(step)) for step in steps)))
    return Numbers("train loss", tuple(f"step {step:,}" for step in steps), tuple(rows))


def loss_of_one(job: Job) -> Section | None:
    """Returns a run's losses with its gradient norm and learning rate below them."""
    series = {key: finite(curve) for key, curve in job.run.series.items()}
    train = series.get(LOSS, Series())
    if not train.steps:
        return None
    drawn = lttb(train, 200)
    lines = [Line(tuple(zip(drawn.steps, drawn.values, strict=True)),
                  f"train {numbers.loss(train.values[-1])}", tip="train loss")]  # fmt: skip
    check = series.get(VALIDATION, Series())
    if check.steps:
        untrained = job.measured(UNTRAINED)
        points = tuple(zip(check.steps, check.values, strict=True))
        begins = ((0, untrained),) if untrained is not None else ()
        lines.append(Line((*begins, *points),
                          f"val {numbers.loss(check.values[-1])}", "--c-1", "--ct-1",
                          "validation loss", dots=True))  # fmt: skip
    what = "Train and validation loss" if check.steps else "Train loss"
    aside = max((line.label for line in lines), key=len)
    told = f"Curves: {what.lower()} over the steps."
    panels = [_lines(what, unit_of_loss([job]), lines, "loss", told)]
    live = [Drawn(what, Curves((LOSS, VALIDATION) if check.steps else (LOSS,)))]
    for key, title in (("train/grad_norm", "Gradient norm"), ("train/lr", "Learning rate")):
        curve = lttb(series.get(key, Series()), 200)
        if len(curve.steps) > 1:
            line = Line(tuple(zip(curve.steps, curve.values, strict=True)), "", tip=title.lower())
            told = f"Curve: {title.lower()} over the steps."
            ident = key.split("/")[1]
            panels.append(
                _lines(title, "", [line], ident, told, aside=aside, zero=True, height=110)
            )
            live.append(Drawn(title, Curves((key,), from_zero=True)))
    return Section("loss", "Loss", headings.loss_heading_of_one(job), tuple(panels),
                   notes=(*_amount(job), *data_notes([job])), numbers=_loss_numbers({job: train}),
                   live=tuple(live))  # fmt: skip


def _amount(job: Job) -> tuple[str, ...]:
    """Returns a note on how much the run saw, as far as it recorded it."""
    ended = job.run.summary
    if ended is None or not ended.tokens or not ended.steps:
        return ()
    size = f" {count_text(ended.parameters)} parameters" if ended.parameters else " The run"
    rows = "pairs of twice" if prefers([job]) else "rows of"
    batch = (
        f", {ended.global_batch:,} {rows} {ended.sequence:,} tokens a step"
        if ended.global_batch and ended.sequence
        else ""
    )
    steps = numbers.plural(ended.steps, "step")
    return (f"{size.strip()} saw {ended.tokens:,} tokens in {steps}{batch}.",)


def data_notes(jobs: Sequence[Job]) -> list[str | Markup]:
    """Returns the notes about the data, each once, with the jobs where not all have it."""
    having: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.run.summary.notes if job.run.summary else ():
            having.setdefault(note, []).append(job.name)
    return [
        f"{numbers.sentence(note)}."
        if len(names) == len(jobs)
        else Markup("{}: {}.").format(findings.listed(names), note)
        for note, names in having.items()
    ]


def throughput(job: Job) -> Section | None:
    """Returns a run's tokens per second over the steps."""
    curve = finite(job.run.series.get(SPEED, Series()))
    if len(curve.steps) < 10:
        return None
    kept = lttb(curve, 200)
    median, steps = job.measured(SPEED), window([job])
    over = f", {steps}" if steps else ""
    line = Line(tuple(zip(kept.steps, kept.values, strict=True)),
                "", tip="tokens per second")  # fmt: skip
    notes = [f"The summary's number is {numbers.whole(median)} tok/s{over}."] if median else []
    return Section("throughput", "Throughput", headings.throughput_heading(curve.values),
                   (_lines("Tokens per second", "all ranks together", [line], "speed",
                           "Curve: tokens per second over the steps.", zero=True, height=150),),
                   notes=tuple(notes),
                   live=(Drawn("Tokens/s of all ranks", Curves((SPEED,), from_zero=True)),)
                   )  # fmt: skip
