"""Records of runs and sweeps, read from their folders.

A damaged ``status.json`` or ``sweep.json`` of the requested folder is rejected. Any other missing
or damaged file, or job of a sweep, reads as ``None`` or empty: a report is needed most when
something has failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from scalewise import regular_files
from scalewise.errors import ConfigError
from scalewise.expectations import Expectation, parse_expectation
from scalewise.goodput import Goodput, compute_goodput, read_attempts
from scalewise.metric_names import SOURCE_LOSS
from scalewise.reports import report_redaction
from scalewise.run_files import (
    RecordError,
    load_json,
    parse_number,
    parse_step,
    parse_time,
    read_csv_rows,
    read_json,
)

CURVES = (
    "train/loss",
    "val/loss",
    "val/reward_accuracy",
    "val/reward",
    "val/accuracy",
    "train/grad_norm",
    "train/skipped_steps",
    "train/lr",
    "experts/max_load",
    "experts/min_load",
    "experts/router_entropy",
    "experts/dropped",
    "throughput/tokens_per_s",
)
"""Columns of ``metrics.csv`` that a report charts over the steps."""

PREDICTED = ("plan/peak_bytes", "plan/step_s", "limit_bytes")
"""Keys of ``plan.json`` that a report compares with measurements."""


@dataclass(frozen=True)
class MetricSeries:
    """A metric over the steps."""

    steps: tuple[int, ...] = ()
    """Steps at which the metric was measured."""
    values: tuple[float, ...] = ()
    """Value at each step; may be NaN or infinite."""


@dataclass(frozen=True)
class RunSummary:
    """Content of ``summary.json``."""

    parameters: int | None = None
    """Number of model parameters."""
    steps: int | None = None
    """Optimizer steps done."""
    tokens: int | None = None
    """Tokens trained on, all ranks."""
    global_batch: int | None = None
    """Samples per optimizer step, all ranks."""
    sequence: int | None = None
    """Sequence length in tokens."""
    window: str = ""
    """Steps and statistic behind the medians."""
    notes: tuple[str, ...] = ()
    """Notes on the data: truncated, dropped, padded or repeated samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured metrics by key."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from the default."""

    key: str
    """Dotted key."""
    default: object
    """Default value."""
    value: object
    """Value of the run."""


@dataclass(frozen=True)
class SuggestedOverride:
    """An override that may fix a failure."""

    override: str
    """``key=value``."""
    reason: str
    """Why it may help, with its predicted effect."""


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder."""

    folder: str
    """Name of the folder."""
    number: int | None = None
    """Job number in the sweep; ``None`` for a single run."""
    status: str = "not_run"
    """Status; ``not_run`` for a job without a folder."""
    reason: str = ""
    """Why the run ended, if not ``ok``."""
    subcommand: str = "train"
    """CLI subcommand."""
    name: str = ""
    """Name of the run."""
    question: str = ""
    """Question that the run answers, from the config."""
    command: str = ""
    """Command line that repeats the run."""
    choices: Mapping[str, object] = field(default_factory=dict)
    """Chosen option of each config group."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides."""
    varied_settings: Mapping[str, object] = field(default_factory=dict)
    """Values of the settings that the sweep varies."""
    changed_settings: tuple[SettingChange, ...] = ()
    """Settings that differ from the defaults."""
    started: datetime | None = None
    """Start time."""
    ended: datetime | None = None
    """End time."""
    seconds: float | None = None
    """Duration in seconds."""
    attempts: int = 1
    """Number of attempts, retries included."""
    world_size: int = 1
    """Number of ranks."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Device, processor, cores, memory and system."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions."""
    git_commit: str = ""
    """Commit hash."""
    git_dirty: bool | None = None
    """Whether the working tree had uncommitted changes."""
    wandb: Mapping[str, object] = field(default_factory=dict)
    """The W&B run."""
    micro_batch: Mapping[str, object] = field(default_factory=dict)
    """Resolved value of ``trainer.micro_batch=auto``."""
    rank: int | None = None
    """Rank that failed."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the log."""
    fixes: tuple[SuggestedOverride, ...] = ()
    """Suggested fixes."""
    summary: RunSummary | None = None
    """Content of ``summary.json``."""
    series: Mapping[str, MetricSeries] = field(default_factory=dict)
    """Metrics over the steps, by key."""
    memory_breakdown: Mapping[str, float] = field(default_factory=dict)
    """Predicted bytes at peak memory, by entry."""
    step_parts: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of a step, by part."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Values of :data:`PREDICTED` in ``plan.json``."""
    goodput: Goodput | None = None
    """Useful and lost time of all attempts; ``None`` if none is recorded."""

    @property
    def ok(self) -> bool:
        """Whether the run finished."""
        return self.status == "ok"


@dataclass(frozen=True)
class SweepRecord:
    """A sweep, read from its folder."""

    folder: str
    """Name of the folder."""
    name: str
    """Name of the sweep."""
    question: str
    """Question that the sweep answers, from the config."""
    command: str
    """Command line that repeats the sweep."""
    subcommand: str
    """CLI subcommand."""
    started: datetime | None
    """Start time."""
    ended: datetime | None
    """End time."""
    varying: Mapping[str, tuple[object, ...]]
    """Values of each varied setting."""
    reference: int | None
    """Index of the reference job in ``jobs``."""
    jobs: tuple[RunRecord, ...]
    """Jobs by number."""
    wandb: Mapping[str, object] = field(default_factory=dict)
    """The W&B report."""
    hypothesis: str = ""
    """Expected answer to the question of a sweep of cases."""
    answer: str = ""
    """Template of the answer, as :func:`scalewise.sweep_question.format_answer` takes it."""
    expectations: Mapping[str, Expectation] = field(default_factory=dict)
    """Expected outcome by case, of a sweep of cases."""
    fit_statuses: Mapping[str, str] = field(default_factory=dict)
    """Predicted fit status by case; empty text if it is unknown."""


def read_record(folder: Path) -> RunRecord | SweepRecord:
    """Read the record of a sweep, if ``folder`` holds ``sweep.json``, else of a run.

    Raises :class:`ConfigError` if the folder holds neither or its record is damaged.
    """
    if sweep := load_json(folder / "sweep.json"):
        return _read_sweep(folder, sweep)
    run = read_run(folder)
    if run is None:
        reason = "holds neither a run (status.json) nor a sweep (sweep.json)"
        raise ConfigError.for_key(
            "", "", f"{folder} {reason}", "pass the folder of a run or sweep, runs/NAME/TIMESTAMP"
        )
    return run


def read_run(folder: Path) -> RunRecord | None:
    """Read the record of a run; ``None`` if the folder has no ``status.json``.

    Raises :class:`RecordError` if ``status.json`` is damaged.
    """
    content = load_json(folder / "status.json")
    if not content:
        return None
    commit = content.pop("git_commit", None)  # redaction would hide 40 hex digits
    status, plan = _redacted(content), read_json(folder / "plan.json")
    return RunRecord(
        folder=folder.name,
        status=status.get("status") or "failed",
        reason=status.get("reason", ""),
        subcommand=status.get("verb") or "train",
        name=status.get("name") or folder.name,
        question=status.get("question", ""),
        command=status.get("command", ""),
        choices=status.get("choices", {}),
        overrides=tuple(status.get("overrides", ())),
        varied_settings=status.get("varied", {}),
        changed_settings=tuple(
            SettingChange(row["key"], row["default"], row["value"])
            for row in status.get("changed", ())
        ),
        started=parse_time(status.get("started")),
        ended=parse_time(status.get("ended")),
        seconds=status.get("seconds"),
        attempts=status.get("attempts") or 1,
        world_size=status.get("world_size") or 1,
        machine=status.get("machine", {}),
        versions=status.get("versions", {}),
        git_commit=commit or "",
        git_dirty=status.get("git_dirty"),
        wandb=status.get("wandb", {}),
        micro_batch=status.get("micro_batch", {}),
        rank=status.get("rank"),
        log_tail=tuple(status.get("log_tail", ())),
        fixes=tuple(
            SuggestedOverride(row["override"], row["why"]) for row in status.get("cures", ())
        ),
        summary=_read_summary(folder / "summary.json"),
        series=_read_series(folder / "metrics.csv"),
        memory_breakdown=plan.get("ledger", {}),
        step_parts=_known_numbers(plan.get("step_parts", {})),
        predicted=_known_numbers({key: plan.get(key) for key in PREDICTED}),
        goodput=compute_goodput(read_attempts(folder)),
    )


def _read_sweep(folder: Path, record: dict[str, Any]) -> SweepRecord:
    sweep = _redacted(record)
    jobs = [_read_job(folder, row) for row in sweep.get("jobs", ())]
    jobs.sort(key=lambda job: job.number or 0)
    numbers = [job.number for job in jobs]
    reference, cases = sweep.get("reference"), sweep.get("cases", {}).items()
    return SweepRecord(
        folder=folder.name,
        name=sweep.get("name") or folder.name,
        question=sweep.get("question", ""),
        hypothesis=sweep.get("hypothesis", ""),
        answer=sweep.get("answer", ""),
        command=sweep.get("command", ""),
        subcommand=sweep.get("verb") or "train",
        started=parse_time(sweep.get("started")),
        ended=parse_time(sweep.get("ended")),
        varying={key: tuple(values) for key, values in sweep.get("varying", {}).items()},
        reference=numbers.index(reference) if reference in numbers else None,
        jobs=tuple(jobs),
        wandb=sweep.get("wandb", {}),
        expectations={name: parse_expectation(name, case["expect"], []) for name, case in cases},
        fit_statuses={name: case["plan"] for name, case in cases},
    )


def _read_job(folder: Path, row: Mapping[str, Any]) -> RunRecord:
    name, listed_status = row["folder"], row["status"] or "not_run"
    reason = "" if listed_status == "not_run" else "The job has no readable status.json."
    run = None
    if (folder / name).resolve().is_relative_to(folder.resolve()):
        try:
            run = read_run(folder / name)
        except RecordError as error:
            reason = report_redaction.redact_text(error.issues[0].reason)
    if run is None:
        run = RunRecord(
            folder=name,
            name=name,
            status=listed_status,
            reason=row.get("reason") or reason,
            overrides=tuple(row.get("overrides", ())),
        )
    return replace(run, number=row["number"], varied_settings=row["varied"] or run.varied_settings)


def _read_summary(path: Path) -> RunSummary | None:
    content = read_json(path)
    if not content:
        return None
    return RunSummary(
        parameters=content.get("parameters"),
        steps=content.get("steps"),
        tokens=content.get("tokens"),
        global_batch=content.get("global_batch"),
        sequence=content.get("sequence"),
        window=content.get("window", ""),
        notes=tuple(content.get("notes", ())),
        metrics=_known_numbers(content.get("metrics", {})),
    )


def _read_series(path: Path) -> dict[str, MetricSeries]:
    """Columns of :data:`CURVES` and of sources of a mixture that have at least one value.

    An incomplete last line is dropped.
    """
    try:
        lines = regular_files.read_text(path, errors="replace").splitlines(keepends=True)
    except OSError:
        return {}
    rows = read_csv_rows([line.rstrip("\r\n") for line in lines if line.endswith("\n")])
    series = {}
    sources = [key for key in (rows[0] if rows else ()) if key.startswith(SOURCE_LOSS)]
    for key in (*CURVES, *sources):
        pairs = [
            (step, value)
            for row in rows
            if (step := parse_step(row.get("step", ""))) is not None
            and (value := parse_number(row.get(key, ""))) is not None
        ]
        if pairs:
            by_step = dict(pairs)  # a resumed run repeats some steps: the later value counts
            steps = sorted(by_step)
            series[key] = MetricSeries(tuple(steps), tuple(by_step[step] for step in steps))
    return series


def _redacted(record: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], report_redaction.redact_values(record))


def _known_numbers(entries: Mapping[str, float | None]) -> dict[str, float]:
    return {key: float(value) for key, value in entries.items() if value is not None}


def report_runs(record: RunRecord | SweepRecord) -> tuple[RunRecord, ...]:
    """Runs of a record: the jobs of a sweep, or the run itself."""
    return record.jobs if isinstance(record, SweepRecord) else (record,)


def wandb_run_ids(record: RunRecord | SweepRecord) -> list[str]:
    """Ids of the W&B runs, uploaded or offline."""
    return [str(run.wandb["id"]) for run in report_runs(record) if run.wandb.get("id")]
