"""Reads what a run or a sweep left in its folder, whole or torn, into frozen records.

Nothing here fails on a file that is missing, half written or odd: what could not be read is
``None`` or empty, because the page must be built above all when something went wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from scalewise import regular_files
from scalewise.errors import ConfigError
from scalewise.reports import redact
from scalewise.tracking.run_files import parse_number, read_csv_rows, read_json

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
    why: str


@dataclass(frozen=True)
class RunRecord:
    """One run. ``status`` is ``not_run`` for a job that has not left a folder yet."""

    folder: str
    number: int | None = None
    status: str = "not_run"
    reason: str = ""
    verb: str = "train"
    name: str = ""
    question: str = ""
    command: str = ""
    choices: Mapping[str, object] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    varied: Mapping[str, object] = field(default_factory=dict)
    changed: tuple[SettingChange, ...] = ()
    started: datetime | None = None
    ended: datetime | None = None
    seconds: float | None = None
    attempts: int = 1
    world_size: int = 1
    machine: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str = ""
    git_dirty: bool | None = None
    wandb: Mapping[str, object] = field(default_factory=dict)
    micro_batch: Mapping[str, object] = field(default_factory=dict)
    """How ``trainer.micro_batch=auto`` was settled."""
    rank: int | None = None
    log_tail: tuple[str, ...] = ()
    cures: tuple[SuggestedOverride, ...] = ()
    summary: RunSummary | None = None
    series: Mapping[str, MetricSeries] = field(default_factory=dict)
    ledger: Mapping[str, float] = field(default_factory=dict)
    """Bytes that were foreseen at the peak, by line."""
    step_parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step that were foreseen, by what they go into."""
    foreseen: Mapping[str, float] = field(default_factory=dict)
    """``plan/peak_bytes``, ``plan/step_s`` and ``limit_bytes``, as far as they are known."""

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
    verb: str
    started: datetime | None
    ended: datetime | None
    varying: Mapping[str, tuple[object, ...]]
    reference: int | None
    jobs: tuple[RunRecord, ...]
    wandb: Mapping[str, object] = field(default_factory=dict)


def read_record(folder: Path) -> RunRecord | SweepRecord:
    """Returns the record of ``folder``, a sweep if it holds ``sweep.json``, else a run.

    Raises :class:`ConfigError` where the folder is neither.
    """
    sweep = _read_json(folder / "sweep.json")
    if sweep is not None:
        return _read_sweep(folder, sweep)
    run = read_run(folder)
    if run is None:
        reason = "neither a run (readable status.json) nor a sweep (readable sweep.json)"
        raise ConfigError.one("", "", f"{folder}: {reason}", "scalewise report runs/NAME/TIMESTAMP")
    return run


def read_run(folder: Path) -> RunRecord | None:
    """Returns the record of a run's folder, ``None`` if it has no readable ``status.json``."""
    found = _read_json(folder / "status.json")
    if found is None:
        return None
    commit = found.pop("git_commit", None)  # forty hex digits, not a key
    status = _as_mapping(redact.redact_values(found))
    machine, world, attempts = (status.get(key) for key in ("machine", "world_size", "attempts"))
    dirty, plan = status.get("git_dirty"), _read_json(folder / "plan.json") or {}
    return RunRecord(
        folder=folder.name,
        status=_as_text(status.get("status")) or "failed",
        reason=_as_text(status.get("reason")),
        verb=_as_text(status.get("verb")) or "train",
        name=_as_text(status.get("name")) or folder.name,
        question=_as_text(status.get("question")),
        command=_as_text(status.get("command")),
        choices=_as_mapping(status.get("choices")),
        overrides=_as_lines(status.get("overrides")),
        varied=_as_mapping(status.get("varied")),
        changed=tuple(
            SettingChange(_as_text(row.get("key")), row.get("default"), row.get("value"))
            for row in _as_rows(status.get("changed"))
        ),
        started=_as_instant(status.get("started")),
        ended=_as_instant(status.get("ended")),
        seconds=_as_finite(status.get("seconds")),
        attempts=_as_count(attempts) or 1,
        world_size=_as_count(world) or 1,
        machine=_as_mapping(machine),
        versions={key: _as_text(item) for key, item in _as_mapping(status.get("versions")).items()},
        git_commit=_as_text(commit),
        git_dirty=dirty if isinstance(dirty, bool) else None,
        wandb=_as_mapping(status.get("wandb")),
        micro_batch=_as_mapping(status.get("micro_batch")),
        rank=_as_count(status.get("rank")),
        log_tail=_as_lines(status.get("log_tail")),
        cures=tuple(
            SuggestedOverride(_as_text(row.get("override")), _as_text(row.get("why")))
            for row in _as_rows(status.get("cures"))
        ),
        summary=_read_summary(folder / "summary.json"),
        series=_read_series(folder / "metrics.csv"),
        ledger=_number_entries(plan.get("ledger")),
        step_parts=_number_entries(plan.get("step_parts")),
        foreseen=_number_entries(plan),
    )


def _read_sweep(folder: Path, found: Mapping[str, object]) -> SweepRecord:
    sweep = _as_mapping(redact.redact_values(dict(found)))
    varying = {
        key: tuple(values) if isinstance(values, list) else (values,)
        for key, values in _as_mapping(sweep.get("varying")).items()
    }
    jobs = [_read_job(folder, row, place) for place, row in enumerate(_as_rows(sweep.get("jobs")))]
    jobs.sort(key=lambda job: job.number or 0)
    numbers = [job.number for job in jobs]
    reference = _as_count(sweep.get("reference"))
    return SweepRecord(
        folder=folder.name,
        name=_as_text(sweep.get("name")) or folder.name,
        question=_as_text(sweep.get("question")),
        command=_as_text(sweep.get("command")),
        verb=_as_text(sweep.get("verb")) or "train",
        started=_as_instant(sweep.get("started")),
        ended=_as_instant(sweep.get("ended")),
        varying=varying,
        reference=numbers.index(reference) if reference in numbers else None,
        jobs=tuple(jobs),
        wandb=_as_mapping(sweep.get("wandb")),
    )


def _read_job(folder: Path, row: Mapping[str, object], place: int) -> RunRecord:
    number = _as_count(row.get("number"))
    number = place if number is None else number
    name = _as_text(row.get("folder")) or str(number)
    listed = _as_text(row.get("status")) or "not_run"
    inside = (folder / name).resolve().is_relative_to(folder.resolve())
    run = read_run(folder / name) if inside else None
    if run is None:
        run = RunRecord(
            folder=name,
            name=name,
            status=listed,
            reason=_as_text(row.get("reason"))
            or ("" if listed == "not_run" else "The job left no readable status.json."),
            overrides=_as_lines(row.get("overrides")),
        )
    return replace(run, number=number, varied=_as_mapping(row.get("varied")) or run.varied)


def _read_summary(path: Path) -> RunSummary | None:
    found = _read_json(path)
    if found is None:
        return None
    return RunSummary(
        parameters=_as_count(found.get("parameters")),
        steps=_as_count(found.get("steps")),
        tokens=_as_count(found.get("tokens")),
        global_batch=_as_count(found.get("global_batch")),
        sequence=_as_count(found.get("sequence")),
        window=_as_text(found.get("window")),
        notes=_as_lines(found.get("notes")),
        metrics=_number_entries(found.get("metrics")),
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
            (int(step), value)
            for row in rows
            if (step := _as_finite(parse_number(row.get("step", "")))) is not None
            and (value := parse_number(row.get(key, ""))) is not None
        ]
        if pairs:
            kept = dict(pairs)  # a resumed run writes some steps twice: the later one holds
            steps = sorted(kept)
            found[key] = MetricSeries(tuple(steps), tuple(kept[step] for step in steps))
    return found


def _read_json(path: Path) -> dict[str, object] | None:
    return read_json(path) or None


def _as_text(value: object) -> str:
    return "" if value is None else str(value)


def _as_mapping(value: object) -> dict[str, object]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _number_entries(value: object) -> dict[str, float]:
    """Returns the entries of a mapping that are numbers."""
    found = {key: _as_number(item) for key, item in _as_mapping(value).items()}
    return {key: number for key, number in found.items() if number is not None}


def _as_rows(value: object) -> list[dict[str, object]]:
    return (
        [_as_mapping(row) for row in value if isinstance(row, dict)]
        if isinstance(value, list)
        else []
    )


def _as_lines(value: object) -> tuple[str, ...]:
    return tuple(_as_text(line) for line in value) if isinstance(value, list) else ()


def _as_number(value: object) -> float | None:
    """Returns a number as a float, NaN and infinity included."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _as_finite(value: object) -> float | None:
    number = _as_number(value)
    return number if number is not None and math.isfinite(number) else None


def _as_count(value: object) -> int | None:
    number = _as_finite(value)
    return None if number is None else int(number)


def _as_instant(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(_as_text(value))
    except ValueError:
        return None
