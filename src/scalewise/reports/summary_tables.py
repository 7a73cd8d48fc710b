"""Tables of a report: header facts, job matrix, comparison and failure cards."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import dedent

from scalewise.reports import number_format
from scalewise.reports.compare import (
    ACCURACY,
    LOSS,
    MAX_CHARTED_JOBS,
    PEAK,
    PREFERENCE_ACCURACY,
    PRICE,
    SPEED,
    STEP,
    VALIDATION_LOSS,
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

MAX_CARDS = 12
"""Failures shown as cards; further ones are rows of a table."""


@dataclass(frozen=True)
class TableCell:
    """A cell of the comparison table."""

    text: str
    """Displayed text."""
    sort_key: str = ""
    """Value by which the page sorts; empty if missing."""
    best: bool = False
    """Whether the value is the best of its column."""
    bar: float | None = None
    """Length of the in-cell bar as a fraction of the longest; ``None`` for no bar."""


@dataclass(frozen=True)
class TableColumn:
    """A column of the comparison table."""

    label: str
    """Heading."""
    cells: tuple[TableCell, ...]
    """One cell per job."""
    sort: int = 1
    """1 if the smallest value is best, -1 if the largest."""


@dataclass(frozen=True)
class OutcomeMatrix:
    """Job outcomes by two varied settings, for one value of a third."""

    title: str
    """``key=value`` of the third setting; empty if there is none."""
    row_key: str
    """Setting that varies by row."""
    column_key: str
    """Setting that varies by column."""
    columns: tuple[str, ...]
    """Values of ``column_key``."""
    rows: tuple[tuple[str, tuple[tuple[tuple[str, str], ...], ...]], ...]
    """Value of ``row_key`` and its cells; a cell holds (status, text) pairs."""


@dataclass(frozen=True)
class FailureCard:
    """A failure and its suggested fixes."""

    name: str
    """Name of the first job with this failure."""
    status: str
    """Status of the job."""
    exit_location: str
    """Job number, rank, steps done and duration."""
    reason: str
    """Reason of the failure."""
    log: tuple[str, ...]
    """Last lines of the log."""
    fixes: tuple[tuple[str, str], ...]
    """Override and reason of each suggested fix."""
    command: str
    """Command line that repeats the job."""
    other_jobs: tuple[str, ...] = ()
    """Other jobs with the same status, reason and fixes."""


def header_facts(
    comparison: ReportComparison, record: RunRecord | SweepRecord
) -> list[tuple[str, str]]:
    """Label and text of the known header facts."""
    runs = [job.run for job in comparison.jobs]
    single = isinstance(record, RunRecord)
    started = record.started
    duration = record.seconds if isinstance(record, RunRecord) else None
    if record.started and record.ended and duration is None:
        duration = (record.ended - record.started).total_seconds()
    outcome = status_word(runs[0].status) if single and runs else outcome_counts(comparison)
    commit = common_value(run.git_commit[:7] for run in runs if run.git_commit)
    is_dirty = any(run.git_dirty for run in runs)
    tree = ", uncommitted changes" if is_dirty else ", clean tree"
    is_tree_known = any(run.git_dirty is not None for run in runs)
    facts = [
        ("Status" if single else "Jobs", outcome),
        ("Started", number_format.format_instant(started) if started else ""),
        ("Duration", format_seconds(duration) if duration is not None else ""),
        ("Device", _device_text(runs)),
        (
            "Software",
            ", ".join(
                f"{name} {version}"
                for name in ("torch", "lightning")
                if (version := common_value(r.versions[name] for r in runs if name in r.versions))
            ),
        ),
        ("Commit", commit + (tree if is_tree_known else "") if commit else ""),
        (
            "Micro-batch",
            common_value(
                f"{run.micro_batch['rows']} samples, {run.micro_batch['how']}"
                for run in runs
                if {"rows", "how"} <= run.micro_batch.keys()
            ),
        ),
    ]
    return [(label, text) for label, text in facts if text]


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
    """The common value, else the number of distinct values."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"{len(distinct)} values" if distinct else ""


def outcome_matrices(comparison: ReportComparison) -> list[OutcomeMatrix]:
    """Outcome of each job with its headline metric, or counts by status for many jobs."""
    keys = sorted(comparison.varying, key=lambda k: -len(comparison.varying[k]))
    is_tally = len(comparison.jobs) > MAX_CHARTED_JOBS or len(keys) > 3
    keys = [key for key in keys if len(comparison.varying[key]) <= MAX_CHARTED_JOBS]
    third_key = keys[2:3] if not is_tally else []
    row_key, column_key = [*keys[:2], "", ""][:2]
    values = comparison.varying
    matrices = []
    for third in values[third_key[0]] if third_key else ("",):
        selected = [
            job
            for job in comparison.jobs
            if not third_key
            or number_format.format_value(job.run.varied_settings.get(third_key[0]))
            == number_format.format_value(third)
        ]
        rows = []
        for row in values[row_key] if row_key else ("",):
            cells = []
            for column in values[column_key] if column_key else ("",):
                cell = {row_key: row, column_key: column}
                inside = [job for job in selected if _is_in_cell(job, cell)]
                cells.append(
                    _outcome_tally(inside)
                    if is_tally
                    else tuple(_outcome_text(comparison, j) for j in inside)
                )
            rows.append((number_format.format_value(row) if row_key else "all jobs", tuple(cells)))
        columns = (
            tuple(number_format.format_value(item) for item in values[column_key])
            if column_key
            else ("",)
        )
        title = f"{third_key[0]}={number_format.format_value(third)}" if third_key else ""
        matrices.append(OutcomeMatrix(title, row_key, column_key, columns, tuple(rows)))
    return matrices


def _is_in_cell(job: ReportJob, cell: dict[str, object]) -> bool:
    return all(
        number_format.format_value(job.run.varied_settings.get(key))
        == number_format.format_value(item)
        for key, item in cell.items()
        if key
    )


def matrix_sum_text(comparison: ReportComparison) -> str:
    """Note on the settings over which a matrix of counts sums; empty for other matrices."""
    keys = sorted(comparison.varying, key=lambda k: -len(comparison.varying[k]))
    if len(comparison.jobs) <= MAX_CHARTED_JOBS and len(keys) <= 3:
        return ""
    shown = [key for key in keys if len(comparison.varying[key]) <= MAX_CHARTED_JOBS][:2]
    rest = " and ".join(key for key in keys if key not in shown)
    return f"Each cell counts jobs by status, over all values of {rest}." if rest else ""


def status_glyph(run: RunRecord) -> str:
    """Name of the status icon of a run; ``retried`` if it finished after a retry."""
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
    counts = Counter(job.run.status for job in jobs)
    return tuple(
        (status, str(count)) for status, count in sorted(counts.items(), key=lambda p: -p[1])
    )


def constant_settings(comparison: ReportComparison) -> str:
    """Recorded settings that are the same in all jobs."""
    runs = [job.run for job in comparison.jobs if job.run.choices]
    texts = []
    for key in ("model", "parallelism", "precision", "optimizer", "data"):
        values = {
            number_format.format_value(run.choices[key]) for run in runs if key in run.choices
        }
        if key not in comparison.varying and len(values) == 1:
            texts.append(f"{key} {values.pop()}")
    summaries = [run.summary for run in runs if run.summary]
    batches = {(s.global_batch, s.sequence) for s in summaries}
    if len(batches) == 1:
        rows, sequence = batches.pop()
        if rows and sequence:
            unit = "pairs of 2 \u00d7" if is_preference(comparison.jobs) else "samples of"
            texts.append(f"{rows:,} {unit} {sequence:,} tokens per step")
    steps = {summary.steps for summary in summaries if summary.steps}
    if len(steps) == 1:
        texts.append(f"{steps.pop():,} steps")
    return ", ".join(texts)


def comparison_table(comparison: ReportComparison, unit: MemoryUnit) -> list[TableColumn]:
    """Columns of the comparison table, rows in the order of :func:`order_jobs`."""
    jobs = order_jobs(comparison)
    reference = comparison.reference

    def column(
        label: str, key: str, sort: int, text: Callable[[float | None], str], bar: bool = False
    ) -> TableColumn | None:
        values = [job.measured(key) if job.run.ok else None for job in jobs]
        measured = [number for number in values if number is not None]
        if not measured:
            return None
        best, largest = best_index(values, sort < 0, text), max(measured)
        return TableColumn(
            label,
            tuple(
                TableCell(
                    text(v),
                    "" if v is None else repr(v),
                    index == best,
                    v / largest if bar and v is not None and largest > 0 else None,
                )
                for index, v in enumerate(values)
            ),
            sort,
        )

    def error_column(label: str, key: str) -> TableColumn | None:
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

    columns = [
        column("tokens/s", SPEED, -1, number_format.format_whole, bar=True),
        column("step, ms", STEP, 1, number_format.format_milliseconds),
        error_column("step error", STEP),
        column(f"peak, {unit.name}", PEAK, 1, unit.text, bar=True),
        error_column("peak error", PEAK),
        column("$ per billion tokens", PRICE, 1, number_format.format_price),
        column("MFU", "throughput/mfu", -1, number_format.format_utilization),
        column("MFU (PaLM)", "throughput/mfu_palm", -1, number_format.format_utilization),
        column("train loss", LOSS, 1, number_format.format_loss),
        column("val loss", VALIDATION_LOSS, 1, number_format.format_loss),
        column("preference accuracy", PREFERENCE_ACCURACY, -1, number_format.format_utilization),
        column("accuracy", ACCURACY, -1, number_format.format_utilization),
    ]
    distances = [largest_distance(job, reference) for job in jobs]
    if any(number is not None for number in distances):
        cells = [
            TableCell(
                "reference" if job is reference else number_format.format_power(number),
                "0" if job is reference else "" if number is None else repr(number),
            )
            for job, number in zip(jobs, distances, strict=True)
        ]
        columns.append(TableColumn("loss difference", tuple(cells)))
    return [column for column in columns if column is not None]


def order_jobs(comparison: ReportComparison) -> list[ReportJob]:
    """Finished jobs by the headline metric, then the others in job order."""
    first = comparison.rank_jobs(*comparison.headline_metric)
    return [*first, *(job for job in comparison.jobs if job not in first)]


def failure_cards(comparison: ReportComparison) -> list[FailureCard]:
    """One card per distinct failure, with the log of its first job."""
    by_failure: dict[tuple[object, ...], list[ReportJob]] = {}
    for job in comparison.unfinished:
        by_failure.setdefault((job.run.status, job.run.reason, job.run.fixes), []).append(job)
    return [
        _failure_card(jobs[0], tuple(job.name for job in jobs[1:])) for jobs in by_failure.values()
    ]


def _failure_card(job: ReportJob, other_jobs: tuple[str, ...]) -> FailureCard:
    run = job.run
    steps_done = run.summary.steps if run.summary else None
    location = [
        f"job {run.number}" if run.number is not None else "",
        f"rank {run.rank}" if run.rank is not None else "",
        f"after {number_format.pluralize(steps_done, 'step')}" if steps_done else "",
        format_seconds(run.seconds) if run.seconds is not None else "",
    ]
    log_lines = [line for line in run.log_tail if line.strip()][-3:]
    return FailureCard(
        name=job.name,
        status=run.status,
        exit_location=", ".join(filter(None, location)),
        reason=" ".join(filter(None, (run.reason, _predicted_peak_text(job)))),
        log=tuple(dedent("\n".join(log_lines)).splitlines()),
        fixes=tuple((fix.override, fix.reason) for fix in run.fixes if fix.override),
        command=run.command,
        other_jobs=other_jobs,
    )


def _predicted_peak_text(job: ReportJob) -> str:
    """Predicted peak memory and limit of a job that ran out of memory; else empty."""
    predicted, limit = job.predicted(PEAK), job.run.predicted.get("limit_bytes")
    if job.run.status != "out_of_memory" or predicted is None:
        return ""
    unit = memory_unit([predicted])
    limit_text = f"; the limit is {unit.full(limit)}" if limit else ""
    return f"The predicted peak was {unit.full(predicted)}{limit_text}."


def count_empty_cells(comparison: ReportComparison) -> int:
    """Number of combinations of the varied values without a job."""
    keys = list(comparison.varying)
    with_job = {
        tuple(number_format.format_value(job.run.varied_settings.get(key)) for key in keys)
        for job in comparison.jobs
    }
    grid = product(
        *([number_format.format_value(v) for v in comparison.varying[key]] for key in keys)
    )
    return sum(cell not in with_job for cell in grid)
