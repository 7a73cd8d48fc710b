"""Progress of jobs, read from the files of their folders."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scalewise import regular_files
from scalewise.errors import ConfigError
from scalewise.launch import slurm_cli
from scalewise.launch.job import attempt_folders
from scalewise.run_files import (
    load_json,
    parse_number,
    parse_step,
    read_csv_rows,
    read_json,
)
from scalewise.tracking import sweep_record

TAIL_BYTES = 16384
"""Bytes read from the end of ``metrics.csv``: tens of steps."""
FINAL_STATUSES = ("ok", "pruned", "failed", "out_of_memory", "timeout", "refused")
"""Final statuses of a job; an interrupted job may be queued to resume."""
STATE_REASONS = {
    "lost": "its process ended without recording an outcome",
    "not_run": "its sweep has ended; resume the sweep with resume_sweep",
}


@dataclass(frozen=True)
class JobProgress:
    """Progress of one job."""

    number: int | None
    """Number in the sweep; None: a single run."""
    name: str
    """Name of the run."""
    varied: Mapping[str, str]
    """Overrides by key that differ between the jobs of the sweep."""
    state: str
    """A status, ``queued``, ``not_run`` (its sweep has ended) or ``lost`` (no final status)."""
    reason: str = ""
    """Reason of the state."""
    step: int | None = None
    """Last recorded step."""
    steps: int | None = None
    """Total number of steps; None before training starts."""
    loss: float | None = None
    """Last training loss."""
    seconds_left: float | None = None
    """Remaining time by the median step time, in seconds; None: not running, or unknown."""
    seconds_silent: float | None = None
    """Time since the last write of metrics or status, in seconds; None: not running."""
    attempts: int = 1
    """Number of attempts."""

    @property
    def is_active(self) -> bool:
        """Whether the job is queued or running."""
        return self.state in ("queued", "running")


def read_progress(folder: Path) -> list[JobProgress]:
    """Progress of the jobs in a sweep folder or a run folder, else raises ``ConfigError``."""
    if not folder.is_dir():
        fix = "scalewise status runs/NAME/TIMESTAMP"
        raise ConfigError.for_key("", "", f"{folder} is not a folder", fix)
    sweep = sweep_record.read_final_record(folder / "sweep.json", sweep_record.is_abandoned_sweep)
    if sweep:
        job_ids = slurm_cli.sweep_job_ids(folder)
        states = slurm_cli.job_states() if job_ids and slurm_cli.has_slurm() else None
        sweep_abandoned = not job_ids and sweep_record.is_abandoned_sweep(sweep)
        return [
            _job_progress(
                folder,
                job,
                job_ids.get(str(job["number"])),
                states,
                sweep_abandoned=sweep_abandoned,
            )
            for job in sweep.get("jobs", [])
        ]
    if status := sweep_record.read_final_record(folder / "status.json", sweep_record.is_lost):
        state = "lost" if sweep_record.is_lost(status) else status.get("status", "failed")
        return [_run_progress(folder, None, {}, status, state)]
    for name in ("sweep.json", "status.json"):
        load_json(folder / name)  # raises the error of a damaged file
    reason = f"{folder} is neither a run (status.json) nor a sweep (sweep.json)"
    raise ConfigError.for_key("", "", reason, "scalewise status runs/NAME/TIMESTAMP")


def _job_progress(
    sweep: Path,
    entry: Mapping[str, Any],
    job_id: str | None,
    states: Mapping[str, str] | None,
    *,
    sweep_abandoned: bool,
) -> JobProgress:
    planned_folder = sweep / entry.get("planned_folder", entry["folder"])
    folder = next(iter(attempt_folders(planned_folder)), sweep / entry["folder"])
    status = sweep_record.read_final_record(folder / "status.json", sweep_record.is_lost)
    will_start = (
        entry["status"] in ("running", "waiting") and job_id is None and not sweep_abandoned
    )
    if will_start and status.get("status") == "interrupted":
        status = {}  # the status belongs to the previous attempt
    state = status.get("status", "queued" if entry["status"] == "running" else entry["status"])
    if state == "waiting":
        state = "queued"
    if job_id is not None and states is not None and state not in FINAL_STATUSES:
        if job_id in states:
            state = "queued" if states[job_id] == "PENDING" or not status else "running"
        elif state in ("queued", "running"):
            state = "lost"
    elif sweep_abandoned and sweep_record.is_lost(status):
        state = "lost"
    elif sweep_abandoned and state == "queued":
        state = "not_run"
    return _run_progress(folder, entry["number"], entry["varied"], status, state)


def _run_progress(
    folder: Path, number: int | None, varied: Mapping[str, str], status: Any, state: str
) -> JobProgress:
    rows = _last_rows(folder / "metrics.csv")
    steps = read_json(folder / "plan.json").get("steps")
    step = parse_step(rows[-1]["step"]) if rows else None
    seconds_left = seconds_silent = None
    if state == "running":
        times = [t for row in rows if (t := parse_number(row.get("time/step_s", ""))) is not None]
        if times and steps is not None and step is not None:
            seconds_left = (steps - step) * median(times)
        files = [folder / name for name in ("status.json", "metrics.csv")]
        seconds_silent = time.time() - max(file.stat().st_mtime for file in files if file.exists())
    return JobProgress(
        number,
        status.get("name", folder.name),
        varied,
        state,
        status.get("reason") or STATE_REASONS.get(state, ""),
        step,
        steps,
        parse_number(rows[-1].get("train/loss", "")) if rows else None,
        seconds_left,
        seconds_silent,
        status.get("attempts", 1),
    )


def _last_rows(file: Path) -> list[dict[str, str]]:
    """Last complete rows of ``metrics.csv``; empty without any."""
    try:
        with regular_files.open_binary(file) as content:
            head = content.readline().decode("utf-8", errors="replace")
            start = max(content.tell(), file.stat().st_size - TAIL_BYTES)
            content.seek(start)
            tail = content.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = tail[: tail.rfind("\n") + 1].splitlines()
    if start > len(head):
        lines = lines[1:]  # the first line is incomplete
    rows = read_csv_rows([head.rstrip("\r\n"), *lines])
    return [row for row in rows if parse_step(row.get("step", "")) is not None]
