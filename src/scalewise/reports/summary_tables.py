"""What a page says in words and tables: facts, what varied, comparison, failures."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import dedent

from scalewise.reports import number_format
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
    ReportComparison,
    ReportJob,
    best_index,
    is_preference,
    largest_distance,
)
from scalewise.reports.number_format import MemoryUnit, memory_unit
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.summary_sentences import outcome_counts, status_word
from scalewise.units import format_seconds

CARDS = 12
"""Failures that get a card; the others stand in one table below."""


@dataclass(frozen=True)
class TableCell:
    """One field of a table; ``order`` is what sorting reads, ``bar`` a share of the longest."""

    text: str
    order: str = ""
    best: bool = False
    bar: float | None = None


@dataclass(frozen=True)
class TableColumn:
    """A column of the comparison: ``sort`` is 1 where the smallest is best, -1 the largest."""

    label: str
    cells: tuple[TableCell, ...]
    sort: int = 1


@dataclass(frozen=True)
class OutcomeMatrix:
    """Which cells ran: two varying keys across and down, one matrix for each value of a third."""

    title: str
    down: str
    across: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[tuple[str, str], ...], ...]], ...]


@dataclass(frozen=True)
class FailureCard:
    """One failure; ``same`` names the other jobs that ended with the same reason and cures."""

    name: str
    status: str
    where: str
    reason: str
    log: tuple[str, ...]
    cures: tuple[tuple[str, str], ...]
    command: str
    same: tuple[str, ...] = ()


def header_facts(
    comparison: ReportComparison, record: RunRecord | SweepRecord
) -> list[tuple[str, str]]:
    """Returns the facts of the header, those that are known."""
    runs = [job.run for job in comparison.jobs]
    single = isinstance(record, RunRecord)
    started, took = record.started, record.seconds if isinstance(record, RunRecord) else None
    if record.started and record.ended and took is None:
        took = (record.ended - record.started).total_seconds()
    ended = status_word(runs[0].status) if single and runs else outcome_counts(comparison)
    commit = common_value(run.git_commit[:7] for run in runs if run.git_commit)
    dirty = any(run.git_dirty for run in runs)
    tree = ", changed since" if dirty else ", clean tree"
    known = any(run.git_dirty is not None for run in runs)
    found = [
        ("Ended" if single else "Jobs", ended),
        ("When", number_format.format_instant(started) if started else ""),
        ("Took", format_seconds(took) if took is not None else ""),
        ("Device", _device_text(runs)),
        (
            "Software",
            ", ".join(
                f"{name} {version}"
                for name in ("torch", "lightning")
                if (version := common_value(r.versions[name] for r in runs if name in r.versions))
            ),
        ),
        ("Commit", commit + (tree if known else "") if commit else ""),
        (
            "Micro batch",
            common_value(
                f"{run.micro_batch['rows']} rows, {run.micro_batch['how']}"
                for run in runs
                if {"rows", "how"} <= run.micro_batch.keys()
            ),
        ),
    ]
    return [(label, text) for label, text in found if text]


def _device_text(runs: Sequence[RunRecord]) -> str:
    device = common_value(str(r.machine["device"]) for r in runs if r.machine.get("device"))
    if device == "cpu":
        device = common_value(
            str(r.machine["processor"]) for r in runs if r.machine.get("processor")
        )
    sizes = sorted({run.world_size for run in runs if run.machine})
    if not sizes:
        return device
    ranks = (
        "1 rank"
        if sizes == [1]
        else f"{number_format.format_range(str(sizes[0]), str(sizes[-1]))} ranks"
    )
    return f"{device}, {ranks}" if device else ranks


def common_value(values: Iterable[str]) -> str:
    """Returns the value that all share, or how many there are."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else f"{len(found)} values" if found else ""


def outcome_matrices(comparison: ReportComparison) -> list[OutcomeMatrix]:
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
            if not extra
            or number_format.format_value(job.run.varied_settings.get(extra[0]))
            == number_format.format_value(third)
        ]
        rows = []
        for row in values[down] if down else ("",):
            cells = []
            for column in values[across] if across else ("",):
                at = {down: row, across: column}
                inside = [job for job in chosen if _cell_value(job, at)]
                cells.append(
                    _outcome_tally(inside)
                    if many
                    else tuple(_outcome_text(comparison, j) for j in inside)
                )
            rows.append((number_format.format_value(row) if down else "all jobs", tuple(cells)))
        columns = (
            tuple(number_format.format_value(item) for item in values[across]) if across else ("",)
        )
        title = f"{extra[0]}={number_format.format_value(third)}" if extra else ""
        found.append(OutcomeMatrix(title, down, across, columns, tuple(rows)))
    return found


def _cell_value(job: ReportJob, cell: dict[str, object]) -> bool:
    return all(
        number_format.format_value(job.run.varied_settings.get(key))
        == number_format.format_value(item)
        for key, item in cell.items()
        if key
    )


def matrix_sum_text(comparison: ReportComparison) -> str:
    """Returns what a matrix of counts adds up over, if it is one."""
    keys = sorted(comparison.varying, key=lambda k: -len(comparison.varying[k]))
    if len(comparison.jobs) <= SHOWN and len(keys) <= 3:
        return ""
    across = [key for key in keys if len(comparison.varying[key]) <= SHOWN][:2]
    rest = " and ".join(key for key in keys if key not in across)
    return f"A cell counts jobs by how they ended, over all values of {rest}." if rest else ""


def status_glyph(run: RunRecord) -> str:
    """Returns the name of the status glyph of ``run``; ``retried`` where it needed a second try."""
    return "retried" if run.ok and run.attempts > 1 else run.status


def _outcome_text(comparison: ReportComparison, job: ReportJob) -> tuple[str, str]:
    key, _ = comparison.headline_metric
    number = job.measured(key)
    if not job.run.ok or number is None:
        return status_glyph(job.run), status_word(job.run.status)
    if key == SPEED:
        return status_glyph(job.run), f"{number_format.format_whole(number)} tok/s"
    if key == STEP:
        return status_glyph(job.run), f"{number_format.format_milliseconds(number)} ms"
    return status_glyph(job.run), f"loss {number_format.format_loss(number)}"


def _outcome_tally(jobs: Sequence[ReportJob]) -> tuple[tuple[str, str], ...]:
    ended = Counter(job.run.status for job in jobs)
    return tuple(
        (status, str(count)) for status, count in sorted(ended.items(), key=lambda p: -p[1])
    )


def held_constant(comparison: ReportComparison) -> str:
    """Returns what did not vary, as far as the jobs recorded it."""
    runs = [job.run for job in comparison.jobs if job.run.choices]
    said = []
    for key in ("model", "parallelism", "precision", "optimizer", "data"):
        values = {
            number_format.format_value(run.choices[key]) for run in runs if key in run.choices
        }
        if key not in comparison.varying and len(values) == 1:
            said.append(f"{key} {values.pop()}")
    ended = [run.summary for run in runs if run.summary]
    batches = {(s.global_batch, s.sequence) for s in ended}
    if len(batches) == 1:
        rows, sequence = batches.pop()
        if rows and sequence:
            what = "pairs of twice" if is_preference(comparison.jobs) else "rows of"
            said.append(f"{rows:,} {what} {sequence:,} tokens a step")
    steps = {summary.steps for summary in ended if summary.steps}
    if len(steps) == 1:
        said.append(f"{steps.pop():,} steps")
    return ", ".join(said)


def comparison_table(comparison: ReportComparison, unit: MemoryUnit) -> list[TableColumn]:
    """Returns the comparison's columns, rows sorted by the headline metric, missing ones last."""
    jobs = order_jobs(comparison)
    reference = comparison.reference

    def column(
        label: str, key: str, sort: int, text: Callable[[float | None], str], bar: bool = False
    ) -> TableColumn | None:
        values = [job.measured(key) if job.run.ok else None for job in jobs]
        known = [number for number in values if number is not None]
        if not known:
            return None
        top, most = best_index(values, sort < 0, text), max(known)
        return TableColumn(
            label,
            tuple(
                TableCell(
                    text(v),
                    "" if v is None else repr(v),
                    place == top,
                    v / most if bar and v is not None and most > 0 else None,
                )
                for place, v in enumerate(values)
            ),
            sort,
        )

    def off(label: str, key: str) -> TableColumn | None:
        errors = [job.prediction_error(key) if job.run.ok else None for job in jobs]
        if all(number is None for number in errors):
            return None
        return TableColumn(
            label,
            tuple(
                TableCell(number_format.format_error(e), "" if e is None else repr(abs(e)))
                for e in errors
            ),
        )

    found = [
        column("tokens/s", SPEED, -1, number_format.format_whole, bar=True),
        column("step, ms", STEP, 1, number_format.format_milliseconds),
        off("step error", STEP),
        column(f"peak, {unit.name}", PEAK, 1, unit.text, bar=True),
        off("peak error", PEAK),
        column("$ a billion tokens", PRICE, 1, format_price),
        column("MFU", "throughput/mfu", -1, format_utilization),
        column("train loss", LOSS, 1, number_format.format_loss),
        column("val loss", VALIDATION, 1, number_format.format_loss),
        column("preferred rightly", PREFERRED, -1, format_utilization),
        column("classified rightly", ACCURACY, -1, format_utilization),
    ]
    far = [largest_distance(job, reference) for job in jobs]
    if any(number is not None for number in far):
        cells = [
            TableCell(
                "reference" if job is reference else number_format.format_power(number),
                "0" if job is reference else "" if number is None else repr(number),
            )
            for job, number in zip(jobs, far, strict=True)
        ]
        found.append(TableColumn("distance", tuple(cells)))
    return [one for one in found if one is not None]


def format_price(price: float | None) -> str:
    """Returns a price, without its sign: ``0.42``, ``7,787``."""
    return number_format.format_fixed(price, 2 if price is not None and price < 100 else 0)


def format_utilization(fraction: float | None) -> str:
    """Returns a utilization with one decimal: ``41.2%``."""
    text = number_format.format_fixed(None if fraction is None else fraction * 100, 1)
    return text if text == number_format.MISSING else f"{text}%"


def order_jobs(comparison: ReportComparison) -> list[ReportJob]:
    """Returns all jobs: the finished by the headline metric, then the others as they came."""
    first = comparison.rank_jobs(*comparison.headline_metric)
    return [*first, *(job for job in comparison.jobs if job not in first)]


def failure_cards(comparison: ReportComparison) -> list[FailureCard]:
    """Returns a card for each way in which jobs did not finish, with the first job's log."""
    alike: dict[tuple[object, ...], list[ReportJob]] = {}
    for job in comparison.unfinished:
        alike.setdefault((job.run.status, job.run.reason, job.run.fixes), []).append(job)
    return [_failure_card(jobs[0], tuple(job.name for job in jobs[1:])) for jobs in alike.values()]


def _failure_card(job: ReportJob, other_jobs: tuple[str, ...]) -> FailureCard:
    run = job.run
    done = run.summary.steps if run.summary else None
    where = [
        f"job {run.number}" if run.number is not None else "",
        f"rank {run.rank}" if run.rank is not None else "",
        f"after {number_format.pluralize(done, 'step')}" if done else "",
        format_seconds(run.seconds) if run.seconds is not None else "",
    ]
    last = [line for line in run.log_tail if line.strip()][-3:]
    return FailureCard(
        name=job.name,
        status=run.status,
        where=", ".join(filter(None, where)),
        reason=" ".join(filter(None, (run.reason, _predicted_peak_text(job)))),
        log=tuple(dedent("\n".join(last)).splitlines()),
        cures=tuple((fix.override, fix.reason) for fix in run.fixes if fix.override),
        command=run.command,
        same=other_jobs,
    )


def _predicted_peak_text(job: ReportJob) -> str:
    """Returns what the planner had said of a job that ran out of memory."""
    said, limit = job.predicted(PEAK), job.run.predicted.get("limit_bytes")
    if job.run.status != "out_of_memory" or said is None:
        return ""
    unit = memory_unit([said])
    there = f"; there are {unit.full(limit)}" if limit else ""
    return f"The planner foresaw a peak of {unit.full(said)}{there}."


def empty_cells(comparison: ReportComparison) -> int:
    """Returns how many combinations of the varying values have no job at all."""
    keys = list(comparison.varying)
    ran = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys)
        for job in comparison.jobs
    }
    grid = product(
        *([number_format.format_value(v) for v in comparison.varying[key]] for key in keys)
    )
    return sum(cell not in ran for cell in grid)
