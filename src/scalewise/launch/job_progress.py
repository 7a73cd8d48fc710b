"""How far jobs are, read off what they leave: anywhere, at any moment, without asking them."""

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
from scalewise.tracking import sweep_record
from scalewise.tracking.run_files import (
    load_json,
    parse_number,
    parse_step,
    read_csv_rows,
    read_json,
)

TAIL_BYTES = 16384
"""What is read of the end of ``metrics.csv``: some tens of steps."""
ENDED = ("ok", "pruned", "failed", "out_of_memory", "timeout", "refused")
"""Statuses that a job keeps; an interrupted one may wait in a queue to go on."""
GONE = {
    "lost": "it left no ending, and is gone",
    "not_run": "its sweep is gone: train with resume_sweep runs it",
}


@dataclass(frozen=True)
class JobProgress:
    """One job as it stands."""

    number: int | None
    """Its place in a sweep; None: a run by itself."""
    name: str
    varied: Mapping[str, str]
    state: str
    """A status, ``queued``, ``not_run``: its sweep is gone, or ``lost``: it is gone without end."""
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    """How many there will be; None until training has begun."""
    loss: float | None = None
    seconds_left: float | None = None
    """The steps left, by the median of the last ones; None: not running, or not known."""
    seconds_silent: float | None = None
    """Since it last wrote a row or a status, while it runs."""
    attempts: int = 1

    @property
    def is_active(self) -> bool:
        """Returns whether it will go on by itself."""
        return self.state in ("queued", "running")


def read_progress(folder: Path) -> list[JobProgress]:
    """Returns the jobs of a sweep's folder, or the one of a run's; refuses another folder."""
    sweep = sweep_record.read_final_record(folder / "sweep.json", sweep_record.is_abandoned_sweep)
    if sweep:
        known = slurm_cli.sweep_job_ids(folder)
        states = slurm_cli.job_states() if known and slurm_cli.has_slurm() else None
        left = not known and sweep_record.is_abandoned_sweep(sweep)
        return [
            _job_progress(folder, row, known.get(str(row["number"])), states, sweep_abandoned=left)
            for row in sweep.get("jobs", [])
        ]
    if status := sweep_record.read_final_record(folder / "status.json", sweep_record.is_lost):
        state = "lost" if sweep_record.is_lost(status) else status.get("status", "failed")
        return [_run_progress(folder, None, {}, status, state)]
    for name in ("sweep.json", "status.json"):
        load_json(folder / name)  # says what is damaged
    reason = f"{folder} is neither a run (status.json) nor a sweep (sweep.json)"
    raise ConfigError.for_key("", "", reason, "scalewise status runs/NAME/TIMESTAMP")


def _job_progress(
    sweep: Path,
    row: Mapping[str, Any],
    job: str | None,
    states: Mapping[str, str] | None,
    *,
    sweep_abandoned: bool,
) -> JobProgress:
    planned = sweep / row.get("planned_folder", row["folder"])
    folder = next(iter(attempt_folders(planned)), sweep / row["folder"])
    status = sweep_record.read_final_record(folder / "status.json", sweep_record.is_lost)
    goes_on = row["status"] in ("running", "waiting") and job is None and not sweep_abandoned
    if goes_on and status.get("status") == "interrupted":
        status = {}  # of an attempt before the one that is to begin
    state = status.get("status", "queued" if row["status"] == "running" else row["status"])
    if state == "waiting":
        state = "queued"
    if job is not None and states is not None and state not in ENDED:
        if job in states:
            state = "queued" if states[job] == "PENDING" or not status else "running"
        elif state in ("queued", "running"):
            state = "lost"
    elif sweep_abandoned and sweep_record.is_lost(status):
        state = "lost"
    elif sweep_abandoned and state == "queued":
        state = "not_run"
    return _run_progress(folder, row["number"], row["varied"], status, state)


def _run_progress(
    folder: Path, number: int | None, varied: Mapping[str, str], status: Any, state: str
) -> JobProgress:
    rows = _last_rows(folder / "metrics.csv")
    steps = read_json(folder / "plan.json").get("steps")
    step = parse_step(rows[-1]["step"]) if rows else None
    left = silent = None
    if state == "running":
        times = [t for row in rows if (t := parse_number(row.get("time/step_s", ""))) is not None]
        if times and steps is not None and step is not None:
            left = (steps - step) * median(times)
        written = [folder / name for name in ("status.json", "metrics.csv")]
        silent = time.time() - max(file.stat().st_mtime for file in written if file.exists())
    return JobProgress(
        number,
        status.get("name", folder.name),
        varied,
        state,
        status.get("reason") or GONE.get(state, ""),
        step,
        steps,
        parse_number(rows[-1].get("train/loss", "")) if rows else None,
        left,
        silent,
        status.get("attempts", 1),
    )


def _last_rows(file: Path) -> list[dict[str, str]]:
    """Returns the last whole rows of ``metrics.csv``; none where there are none yet."""
    try:
        with regular_files.open_binary(file) as content:
            head = content.readline().decode("utf-8", errors="replace")
            start = max(content.tell(), file.stat().st_size - TAIL_BYTES)
            content.seek(start)
            tail = content.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    whole = tail[: tail.rfind("\n") + 1].splitlines()
    if start > len(head):
        whole = whole[1:]  # the first is cut
    rows = read_csv_rows([head.rstrip("\r\n"), *whole])
    return [row for row in rows if parse_step(row.get("step", "")) is not None]
