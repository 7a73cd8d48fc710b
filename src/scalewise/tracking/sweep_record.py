"""State of runs and sweeps by their records: start times, and whether their processes are alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from scalewise import atomic
from scalewise.run_files import parse_time, read_json

MAX_CLOCK_SKEW = 2.0
"""Seconds by which the creation time of a process may exceed its recorded start."""


def run_start(folder: Path) -> datetime:
    """Start time of the run in ``folder``, in UTC (folder names are in local time).

    Without a readable ``status.json``, the modification time of ``overrides.txt``.
    """
    return _recorded_start(read_json(folder / "status.json"), folder / "overrides.txt")


def sweep_start(folder: Path) -> datetime:
    """Start time of the sweep in ``folder``, in UTC."""
    return _recorded_start(read_json(folder / "sweep.json"), folder / "sweep.json")


def _recorded_start(record: Mapping[str, Any], file: Path) -> datetime:
    if (start := parse_time(record.get("started"))) is not None:
        return start
    try:
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)
    except OSError:
        return datetime.fromtimestamp(0, UTC)


def is_same_process(pid: object, started: object) -> bool:
    """Whether the process with ``pid`` on this machine is the one of the record.

    Args:
        pid: Process id.
        started: Recorded start, in seconds since 1970 or as ISO 8601.
    """
    try:
        process_id = int(str(pid))
        if isinstance(started, int | float):
            start = float(started)
        elif (time := parse_time(started)) is not None:
            start = time.timestamp()
        else:
            return False
        process = psutil.Process(process_id)
        is_older = process.create_time() <= start + MAX_CLOCK_SKEW
        return process_id != os.getpid() and is_older and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, OverflowError, psutil.Error):
        return False


def is_running(status: Mapping[str, Any]) -> bool:
    """Whether the job is running in a process of this machine."""
    is_marked = status.get("status") == "running"
    return is_marked and is_same_process(status.get("process"), status.get("started"))


def is_lost(status: Mapping[str, Any]) -> bool:
    """Whether the job is marked as running on this machine, but its process is gone."""
    is_local = status.get("status") == "running" and status.get("host") == socket.gethostname()
    return is_local and not is_same_process(status.get("process"), status.get("started"))


def release_reserved(folder: Path) -> None:
    """Free disk space reserved by killed processes in the folder of a run or sweep.

    Space reserved on another machine is kept, as its process may be running.
    """
    for job_folder in (folder, *(file.parent for file in folder.glob("*/status.json"))):
        status = read_json(job_folder / "status.json")
        if is_lost(status) and status.get("process") != os.getpid():
            atomic.release_space(job_folder / "status.json")
    if is_abandoned_sweep(read_json(folder / "sweep.json")):
        atomic.release_space(folder / "sweep.json")


def read_final_record(file: Path, is_dead: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Read a record that its process updates; read it again if the process is dead.

    A process may write its final state and exit between the first read and the check.
    """
    record = read_json(file)
    return read_json(file) if is_dead(record) else record


def is_abandoned_sweep(record: Mapping[str, Any]) -> bool:
    """Whether a sweep has not ended, but its process is gone from this machine."""
    process = record.get("process", {})
    if record.get("ended") is not None:
        return False
    is_local = process.get("host") == socket.gethostname()
    return is_local and not is_same_process(process.get("pid"), process.get("started"))
