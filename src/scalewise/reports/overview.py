"""What a page says in words and tables: facts, what varied, comparison, failures."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import dedent

from scalewise.reports import numbers
from scalewise.reports.compare import (
    ACCURACY,
    LOSS,
    PEAK,
    PREFERRED,
    PRICE,
    SHOWN,
    SPEED,
    STEP,
    VALIDATION,
    Comparison,
    Job,
    best,
    largest_distance,
    prefers,
)
from scalewise.reports.findings import counts, status_word
from scalewise.reports.numbers import MemoryUnit, memory_unit
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.units import seconds_text

CARDS = 12
"""Failures that get a card; the others stand in one table below."""


@dataclass(frozen=True)
class Cell:
    """One field of a table; ``order`` is what sorting reads, ``bar`` a share of the longest."""

    text: str
    order: str = ""
    best: bool = False
    bar: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of the comparison: ``sort`` is 1 where the smallest is best, -1 the largest."""

    label: str
    cells: tuple[Cell, ...]
    sort: int = 1


@dataclass(frozen=True)
class Matrix:
    """Which cells ran: two varying keys across and down, one matrix for each value of a third."""

    title: str
    down: str
    across: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[tuple[str, str], ...], ...]], ...]


@dataclass(frozen=True)
class Card:
    """One failure; ``same`` names the other jobs that ended with the same reason and cures."""

    name: str
    status: str
    where: str
    reason: str
    log: tuple[str, ...]
    cures: tuple[tuple[str, str], ...]
    command: str
    same: tuple[str, ...] = ()


def facts(comparison: Comparison, record: RunRecord | SweepRecord) -> list[tuple[str, str]]:
    """Returns the facts of the header, those that are known."""
    runs = [job.run for job in comparison.jobs]
    single = isinstance(record, RunRecord)
    started, took = record.started, record.seconds if isinstance(record, RunRecord) else None
    if record.started and record.ended and took is None:
        took = (record.ended - record.started).total_seconds()
    ended = status_word(runs[0].status) if single and runs else counts(comparison)
    commit = common(run.git_commit[:7] for run in runs if run.git_commit)
    dirty = any(run.git_dirty for run in runs)
    tree = ", changed since" if dirty else ", clean tree"
    known = any(run.git_dirty is not None for run in runs)
    found = [
        ("Ended" if single else "Jobs", ended),
        ("When", numbers.instant(started) if started else ""),
        ("Took", seconds_text(took) if took is not None else ""),
        ("Device", _device(runs)),
        ("Software", ", ".join(
            f"{name} {version}" for name in ("torch", "lightning")
            if (version := common(r.versions[name] for r in runs if name in r.versions))
        )),
        ("Commit", commit + (tree if known else "") if commit else ""),
        ("Micro batch", common(
            f"{run.micro_batch['rows']} rows, {run.micro_batch['how']}"
            for run in runs if run.micro_batch
        )),
    ]  # fmt: skip
    return [(label, text) for label, text in found if text]


def _device(runs: Sequence[RunRecord]) -> str:
    device = common(str(r.machine["device"]) for r in runs if r.machine.get("device"))
    if device == "cpu":
        device = common(str(r.machine["processor"]) for r in runs if r.machine.get("processor"))
    sizes = sorted({run.world_size for run in runs if run.machine})
    if not sizes:
        return device
    ranks = "1 rank" if sizes == [1] else f"{numbers.between(str(sizes[0]), str(sizes[-1]))} ranks"
    return f"{device}, {ranks}" if device else ranks


def common(values: Iterable[str]) -> str:
    """Returns the value that all share, or how many there are."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else f"{len(found)} values" if found else ""


def matrices(comparison: Comparison) -> list[Matrix]:
    """Returns which jobs ran: each one's headline number, or counts of endings for many jobs."""
    keys = sorted(comparison.varying, key=lambda k: -len(comparison.varying[k]))
    many = len(comparison.jobs) > SHOWN or len(keys) > 3
    keys = [key for key in keys if len(comparison.varying[key]) <= SHOWN]
    extra = keys[2:3] if not many else []
    down, across = [*keys[:2], "", ""][:2]
    values = comparison.varying
    found = []
    for third in values[extra[0]] if extra else ("",):
        chosen = [
            job
            for job in comparison.jobs
            if not extra or numbers.value(job.run.varied.get(extra[0])) == numbers.value(third)
        ]
        rows = []
        for row in values[down] if down else ("",):
            cells = []
            for column in values[across] if across else ("",):
                at = {down: row, across: column}
                inside = [job for job in chosen if _stands(job, at)]
                cells.append(
                    _tally(inside) if many else tuple(_ending(comparison, j) for j in inside)
                )
            rows.append((numbers.value(row) if down else "all jobs", tuple(cells)))
        columns = tuple(numbers.value(item) for item in values[across]) if across else ("",)
        title = f"{extra[0]}={numbers.value(third)}" if extra else ""
        found.append(Matrix(title, down, across, columns, tuple(rows)))
    return found


def _stands(job: Job, at: dict[str, object]) -> bool:
    return all(
        numbers.value(job.run.varied.get(key)) == numbers.value(item)
        for key, item in at.items()
        if key
    )


def summed(comparison: Comparison) -> str:
    """Returns what a matrix of counts adds up over, if it is one."""
    keys = sorted(comparison.varying, key=lambda k: -len(comparison.varying[k]))
    if len(comparison.jobs) <= SHOWN and len(keys) <= 3:
        return ""
    across = [key for key in keys if len(comparison.varying[key]) <= SHOWN][:2]
    rest = " and ".join(key for key in keys if key not in across)
    return f"A cell counts jobs by how they ended, over all values of {rest}." if rest else ""


def glyph(run: RunRecord) -> str:
    """Returns the name of the status glyph of ``run``; ``retried`` where it needed a second try."""
    return "retried" if run.ok and run.attempts > 1 else run.status


def _ending(comparison: Comparison, job: Job) -> tuple[str, str]:
    key, _ = comparison.headline
    number = job.measured(key)
    if not job.run.ok or number is None:
        return glyph(job.run), status_word(job.run.status)
    if key == SPEED:
        return glyph(job.run), f"{numbers.whole(number)} tok/s"
    if key == STEP:
        return glyph(job.run), f"{numbers.milliseconds(number)} ms"
    return glyph(job.run), f"loss {numbers.loss(number)}"


def _tally(jobs: Sequence[Job]) -> tuple[tuple[str, str], ...]:
    ended = Counter(job.run.status for job in jobs)
    return tuple(
        (status, str(count)) for status, count in sorted(ended.items(), key=lambda p: -p[1])
    )


def held_constant(comparison: Comparison) -> str:
    """Returns what did not vary, as far as the jobs recorded it."""
    runs = [job.run for job in comparison.jobs if job.run.choices]
    said = []
    for key in ("model", "parallelism", "precision", "optimizer", "data"):
        values = {numbers.value(run.choices[key]) for run in runs if key in run.choices}
        if key not in comparison.varying and len(values) == 1:
            said.append(f"{key} {values.pop()}")
    ended = [run.summary for run in runs if run.summary]
    batches = {(s.global_batch, s.sequence) for s in ended}
    if len(batches) == 1:
        rows, sequence = batches.pop()
        if rows and sequence:
            what = "pairs of twice" if prefers(comparison.jobs) else "rows of"
            said.append(f"{rows:,} {what} {sequence:,} tokens a step")
    steps = {summary.steps for summary in ended if summary.steps}
    if len(steps) == 1:
        said.append(f"{steps.pop():,} steps")
    return ", ".join(said)


def table(comparison: Comparison, unit: MemoryUnit) -> list[Column]:
    """Returns the comparison's columns, rows sorted by the headline metric, missing ones last."""
    jobs = order(comparison)
    reference = comparison.reference

    def column(
        label: str, key: str, sort: int, text: Callable[[float | None], str], bar: bool = False
    ) -> Column | None:
        values = [job.measured(key) if job.run.ok else None for job in jobs]
        known = [number for number in values if number is not None]
        if not known:
            return None
        top, most = best(values, sort < 0, text), max(known)
        return Column(label, tuple(
            Cell(text(v), "" if v is None else repr(v), place == top,
                 v / most if bar and v is not None and most > 0 else None)
            for place, v in enumerate(values)
        ), sort)  # fmt: skip

    def off(label: str, key: str) -> Column | None:
        errors = [job.error(key) if job.run.ok else None for job in jobs]
        if all(number is None for number in errors):
            return None
        return Column(label, tuple(
            Cell(numbers.error(e), "" if e is None else repr(abs(e))) for e in errors
        ))  # fmt: skip

    found = [
        column("tokens/s", SPEED, -1, numbers.whole, bar=True),
        column("step, ms", STEP, 1, numbers.milliseconds),
        off("step error", STEP),
        column(f"peak, {unit.name}", PEAK, 1, unit.text, bar=True),
        off("peak error", PEAK),
        column("$ a billion tokens", PRICE, 1, dollars),
        column("MFU", "throughput/mfu", -1, share),
        column("train loss", LOSS, 1, numbers.loss),
        column("val loss", VALIDATION, 1, numbers.loss),
        column("preferred rightly", PREFERRED, -1, share),
        column("classified rightly", ACCURACY, -1, share),
    ]
    far = [largest_distance(job, reference) for job in jobs]
    if any(number is not None for number in far):
        cells = [
            Cell("reference" if job is reference else numbers.power(number),
                 "0" if job is reference else "" if number is None else repr(number))
            for job, number in zip(jobs, far, strict=True)
        ]  # fmt: skip
        found.append(Column("distance", tuple(cells)))
    return [one for one in found if one is not None]


def dollars(price: float | None) -> str:
    """Returns a price, without its sign: ``0.42``, ``7,787``."""
    return numbers.fixed(price, 2 if price is not None and price < 100 else 0)


def share(fraction: float | None) -> str:
    """Returns a utilization with one decimal: ``41.2%``."""
    text = numbers.fixed(None if fraction is None else fraction * 100, 1)
    return text if text == numbers.MISSING else f"{text}%"


def order(comparison: Comparison) -> list[Job]:
    """Returns all jobs: the finished by the headline metric, then the others as they came."""
    first = comparison.ranked(*comparison.headline)
    return [*first, *(job for job in comparison.jobs if job not in first)]


def cards(comparison: Comparison) -> list[Card]:
    """Returns a card for each way in which jobs did not finish, with the first job's log."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in comparison.unfinished:
        alike.setdefault((job.run.status, job.run.reason, job.run.cures), []).append(job)
    return [_card(jobs[0], tuple(job.name for job in jobs[1:])) for jobs in alike.values()]


def _card(job: Job, same: tuple[str, ...]) -> Card:
    run = job.run
    done = run.summary.steps if run.summary else None
    where = [
        f"job {run.number}" if run.number is not None else "",
        f"rank {run.rank}" if run.rank is not None else "",
        f"after {numbers.plural(done, 'step')}" if done else "",
        seconds_text(run.seconds) if run.seconds is not None else "",
    ]
    last = [line for line in run.log_tail if line.strip()][-3:]
    return Card(
        name=job.name,
        status=run.status,
        where=", ".join(filter(None, where)),
        reason=" ".join(filter(None, (run.reason, _foreseen(job)))),
        log=tuple(dedent("\n".join(last)).splitlines()),
        cures=tuple((cure.override, cure.why) for cure in run.cures if cure.override),
        command=run.command,
        same=same,
    )


def _foreseen(job: Job) -> str:
    """Returns what the planner had said of a job that ran out of memory."""
    said, limit = job.foreseen(PEAK), job.run.foreseen.get("limit_bytes")
    if job.run.status != "out_of_memory" or said is None:
        return ""
    unit = memory_unit([said])
    there = f"; there are {unit.full(limit)}" if limit else ""
    return f"The planner foresaw a peak of {unit.full(said)}{there}."


def empty_cells(comparison: Comparison) -> int:
    """Returns how many combinations of the varying values have no job at all."""
    keys = list(comparison.varying)
    ran = {tuple(numbers.value(job.run.varied.get(key)) for key in keys) for job in comparison.jobs}
    grid = product(*([numbers.value(v) for v in comparison.varying[key]] for key in keys))
    return sum(cell not in ran for cell in grid)
