"""What the jobs learned, over the steps: losses, distances, norms, rates and throughput."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from scalewise.reports import charts, findings, headings, numbers
from scalewise.reports.charts import Line
from scalewise.reports.compare import (
    EQUIVALENT,
    LOSS,
    SHOWN,
    SPEED,
    VALIDATION,
    Comparison,
    Job,
    distance,
    finite,
    lttb,
)
from scalewise.reports.layout import Drawing, twice
from scalewise.reports.records import Series
from scalewise.reports.sections import Numbers, Panel, Section


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
    lines = [
        _line(job, curve, points, "" if same or job not in comparison.shown
              else f"{job.name} {numbers.loss(curve.values[-1])}", job not in comparison.shown)
        for job, curve in curves.items()
    ]  # fmt: skip
    panels = [_lines("Train loss", f"nats per token, {numbers.plural(len(curves), 'job')}", lines,
                     "loss", "Curves: train loss over the steps.", note=note)]  # fmt: skip
    validation = _curves(comparison, VALIDATION)
    if validation:
        spots = [
            _line(job, curve, points, f"{job.name} {numbers.loss(curve.values[-1])}"
                  if job in comparison.shown else "", job not in comparison.shown, dots=True)
            for job, curve in validation.items()
        ]  # fmt: skip
        panels.append(_lines("Validation loss", "nats per token", spots, "val",
                             "Points: validation loss over the steps."))  # fmt: skip
    panels += _distances(comparison, far, points)
    notes: list[str | Markup] = []
    if same:
        notes.append(
            "The curves cannot be told apart by eye: the panel of distances shows what is left."
        )
    if comparison.groups:
        names = [
            Markup('<b class="ct{}">{}</b>').format(place, name)
            for place, name in enumerate(comparison.groups)
        ]
        notes.append(
            Markup("Colour is {}: {}.").format(comparison.group_key, findings.listed(names))
        )
    if far:
        notes.append(
            "Distance is the absolute difference of train loss at the same step; the number is the "
            "largest. It compares single runs and says nothing of the spread between seeds."
        )
    return Section("loss", "Loss", headings.loss_heading(comparison), tuple(panels), (),
                   tuple(notes), _loss_numbers({j: c for j, c in curves.items() if j in comparison.shown}))  # fmt: skip


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


def _distances(comparison: Comparison, far: Mapping[Job, Series], points: int) -> list[Panel]:
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
    return [_lines(f"Distance from {comparison.reference.name}",
                   "absolute difference of train loss, log scale", lines, "far",
                   "Curves: distance of each job's loss from the reference, on a log scale.",
                   log=True, bound=EQUIVALENT if least < 10 * EQUIVALENT else None)]  # fmt: skip


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
        lines.append(Line(tuple(zip(check.steps, check.values, strict=True)),
                          f"val {numbers.loss(check.values[-1])}", "--c-1", "--ct-1",
                          "validation loss", dots=True))  # fmt: skip
    what = "Train and validation loss" if check.steps else "Train loss"
    panels = [
        _lines(what, "nats per token", lines, "loss", f"Curves: {what.lower()} over the steps.")
    ]
    for key, title, detail in (
        ("train/grad_norm", "Gradient norm", "before clipping"),
        ("train/lr", "Learning rate", ""),
    ):
        curve = lttb(series.get(key, Series()), 200)
        if len(curve.steps) > 1:
            line = Line(tuple(zip(curve.steps, curve.values, strict=True)), "", tip=title.lower())
            panels.append(_lines(title, detail, [line], key.split("/")[1],
                                 f"Curve: {title.lower()} over the steps.", zero=True, height=110))  # fmt: skip
    return Section("loss", "Loss", headings.loss_heading_of_one(job), tuple(panels),
                   numbers=_loss_numbers({job: train}))  # fmt: skip


def throughput(job: Job) -> Section | None:
    """Returns a run's tokens per second over the steps."""
    curve = finite(job.run.series.get(SPEED, Series()))
    if len(curve.steps) < 10:
        return None
    kept = lttb(curve, 200)
    median = job.measured(SPEED)
    line = Line(tuple(zip(kept.steps, kept.values, strict=True)),
                f"{numbers.whole(curve.values[-1])}", tip="tokens per second")  # fmt: skip
    notes = (
        [f"The median, {numbers.whole(median)} tok/s, is the number in the header."]
        if median
        else []
    )
    return Section("throughput", "Throughput", headings.throughput_heading(curve.values),
                   (_lines("Tokens per second", "all ranks together", [line], "speed",
                           "Curve: tokens per second over the steps.", zero=True, height=150),),
                   notes=tuple(notes))  # fmt: skip
