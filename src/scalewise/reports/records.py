"""Reads what a run or a sweep left in its folder, whole or torn, into frozen records.

A damaged ``status.json`` or ``sweep.json`` of the folder that is asked for is rejected. Any other
file that is missing or damaged reads as ``None`` or empty, and so does a job of a sweep, because
the page must be built above all when something went wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from scalewise import regular_files
from scalewise.errors import ConfigError
from scalewise.reports import redact
from scalewise.tracking.run_files import (
    RecordError,
    load_json,
    parse_number,
    parse_step,
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
    "train/lr",
    "throughput/tokens_per_s",
)
"""Columns of ``metrics.csv`` that a page draws over the steps."""

PREDICTED = ("plan/peak_bytes", "plan/step_s", "limit_bytes")
"""Keys of ``plan.json`` that a page compares with measurements."""


@dataclass(frozen=True)
class MetricSeries:
    """One metric over the steps at which it was measured; a value may be NaN or infinite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunSummary:
    """The numbers a run ends with; ``metrics`` holds only what was measured."""

    parameters: int | None = None
    steps: int | None = None
    tokens: int | None = None
    global_batch: int | None = None
    sequence: int | None = None
    window: str = ""
    notes: tuple[str, ...] = ()
    """Lines about the data: what was cut, left out, padded or repeated."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from the default."""

    key: str
    default: object
    value: object


@dataclass(frozen=True)
class SuggestedOverride:
    """An override that may mend a failure, and why."""

    override: str
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """One run. ``status`` is ``not_run`` for a job that has not left a folder yet."""

    folder: str
    number: int | None = None
    status: str = "not_run"
    reason: str = ""
    subcommand: str = "train"
    name: str = ""
    question: str = ""
    command: str = ""
    choices: Mapping[str, object] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    varied_settings: Mapping[str, object] = field(default_factory=dict)
    changed_settings: tuple[SettingChange, ...] = ()
    started: datetime | None = None
    ended: datetime | None = None
    seconds: float | None = None
    attempts: int = 1
    world_size: int = 1
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str = ""
    git_dirty: bool | None = None
    wandb: Mapping[str, object] = field(default_factory=dict)
    micro_batch: Mapping[str, object] = field(default_factory=dict)
    """How ``trainer.micro_batch=auto`` was settled."""
    rank: int | None = None
    log_tail: tuple[str, ...] = ()
    fixes: tuple[SuggestedOverride, ...] = ()
    summary: RunSummary | None = None
    series: Mapping[str, MetricSeries] = field(default_factory=dict)
    memory_breakdown: Mapping[str, float] = field(default_factory=dict)
    """Bytes that were foreseen at the peak, by line."""
    step_parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step that were foreseen, by what they go into."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """The numbers of :data:`PREDICTED` that are known."""

    @property
    def ok(self) -> bool:
        """Whether the run went to its end."""
        return self.status == "ok"


@dataclass(frozen=True)
class SweepRecord:
    """A sweep and its jobs, in the order of their numbers; ``reference`` indexes ``jobs``."""

    folder: str
    name: str
    question: str
    command: str
    subcommand: str
    started: datetime | None
    ended: datetime | None
    varying: Mapping[str, tuple[object, ...]]
    reference: int | None
    jobs: tuple[RunRecord, ...]
    wandb: Mapping[str, object] = field(default_factory=dict)


def read_record(folder: Path) -> RunRecord | SweepRecord:
    """Returns the record of ``folder``, a sweep if it holds ``sweep.json``, else a run.

    Raises :class:`ConfigError` where the folder is neither, or its record is damaged.
    """
    if sweep := load_json(folder / "sweep.json"):
        return _read_sweep(folder, sweep)
    run = read_run(folder)
    if run is None:
        reason = "neither a run (readable status.json) nor a sweep (readable sweep.json)"
        raise ConfigError.for_key(
            "", "", f"{folder}: {reason}", "scalewise report runs/NAME/TIMESTAMP"
        )
    return run


def read_run(folder: Path) -> RunRecord | None:
    """Returns the record of a run's folder, ``None`` if it has no ``status.json``.

    Raises :class:`RecordError` where that is damaged.
    """
    found = load_json(folder / "status.json")
    if not found:
        return None
    commit = found.pop("git_commit", None)  # forty hex digits, not a key
    status, plan = _redacted(found), read_json(folder / "plan.json")
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
        started=_parse_time(status.get("started")),
        ended=_parse_time(status.get("ended")),
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
    )


def _read_sweep(folder: Path, record: dict[str, Any]) -> SweepRecord:
    sweep = _redacted(record)
    jobs = [_read_job(folder, row) for row in sweep.get("jobs", ())]
    jobs.sort(key=lambda job: job.number or 0)
    numbers = [job.number for job in jobs]
    reference = sweep.get("reference")
    return SweepRecord(
        folder=folder.name,
        name=sweep.get("name") or folder.name,
        question=sweep.get("question", ""),
        command=sweep.get("command", ""),
        subcommand=sweep.get("verb") or "train",
        started=_parse_time(sweep.get("started")),
        ended=_parse_time(sweep.get("ended")),
        varying={key: tuple(values) for key, values in sweep.get("varying", {}).items()},
        reference=numbers.index(reference) if reference in numbers else None,
        jobs=tuple(jobs),
        wandb=sweep.get("wandb", {}),
    )


def _read_job(folder: Path, row: Mapping[str, Any]) -> RunRecord:
    name, listed = row["folder"], row["status"] or "not_run"
    reason = "" if listed == "not_run" else "The job left no readable status.json."
    run = None
    if (folder / name).resolve().is_relative_to(folder.resolve()):
        try:
            run = read_run(folder / name)
        except RecordError as error:
            reason = redact.redact_text(error.issues[0].reason)
    if run is None:
        run = RunRecord(
            folder=name,
            name=name,
            status=listed,
            reason=row.get("reason") or reason,
            overrides=tuple(row.get("overrides", ())),
        )
    return replace(run, number=row["number"], varied_settings=row["varied"] or run.varied_settings)


def _read_summary(path: Path) -> RunSummary | None:
    found = read_json(path)
    if not found:
        return None
    return RunSummary(
        parameters=found.get("parameters"),
        steps=found.get("steps"),
        tokens=found.get("tokens"),
        global_batch=found.get("global_batch"),
        sequence=found.get("sequence"),
        window=found.get("window", ""),
        notes=tuple(found.get("notes", ())),
        metrics=_known_numbers(found.get("metrics", {})),
    )


def _read_series(path: Path) -> dict[str, MetricSeries]:
    """Returns the columns of :data:`CURVES` that hold a value; a torn last line is dropped."""
    try:
        lines = regular_files.read_text(path, errors="replace").splitlines(keepends=True)
    except OSError:
        return {}
    rows = read_csv_rows([line.rstrip("\r\n") for line in lines if line.endswith("\n")])
    found = {}
    for key in CURVES:
        pairs = [
            (step, value)
            for row in rows
            if (step := parse_step(row.get("step", ""))) is not None
            and (value := parse_number(row.get(key, ""))) is not None
        ]
        if pairs:
            kept = dict(pairs)  # a resumed run writes some steps twice: the later one holds
            steps = sorted(kept)
            found[key] = MetricSeries(tuple(steps), tuple(kept[step] for step in steps))
    return found


def _redacted(record: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], redact.redact_values(record))


def _known_numbers(entries: Mapping[str, float | None]) -> dict[str, float]:
    return {key: float(value) for key, value in entries.items() if value is not None}


def _parse_time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None
