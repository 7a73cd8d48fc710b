"""What a sweep's record says of its jobs, and whether a process that a record names lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from scalewise import atomic
from scalewise.tracking.run_files import read_json

CLOCKS_APART = 2.0
"""Seconds by which a process may seem to have begun after it wrote when it did."""


def run_start(folder: Path) -> datetime:
    """Returns when the run in a folder started, in UTC: names of folders are in local time.

    A folder without a readable ``status.json`` is as old as its ``overrides.txt``.
    """
    return _recorded_start(read_json(folder / "status.json"), folder / "overrides.txt")


def sweep_start(folder: Path) -> datetime:
    """Returns when the sweep in a folder started, in UTC."""
    return _recorded_start(read_json(folder / "sweep.json"), folder / "sweep.json")


def _recorded_start(record: Mapping[str, Any], file: Path) -> datetime:
    try:
        return datetime.fromisoformat(str(record.get("started"))).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)
    except OSError:
        return datetime.fromtimestamp(0, UTC)


def is_same_process(pid: object, started: object) -> bool:
    """Returns whether the process that had ``pid`` at a time has it still, on this machine.

    ``started``: seconds since 1970, or a time as ISO 8601.
    """
    try:
        number = int(str(pid))
        if isinstance(started, int | float):
            at = float(started)
        else:
            at = datetime.fromisoformat(str(started)).timestamp()
        process = psutil.Process(number)
        begun = process.create_time() <= at + CLOCKS_APART
        return number != os.getpid() and begun and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, OverflowError, psutil.Error):
        return False


def is_running(status: Mapping[str, Any]) -> bool:
    """Returns whether a job runs, by a process of this machine."""
    runs = status.get("status") == "running"
    return runs and is_same_process(status.get("process"), status.get("started"))


def is_lost(status: Mapping[str, Any]) -> bool:
    """Returns whether a job that says that it runs has no process any more on this machine."""
    here = status.get("status") == "running" and status.get("host") == socket.gethostname()
    return here and not is_same_process(status.get("process"), status.get("started"))


def release_reserved(folder: Path) -> None:
    """Frees the disk space that killed processes left reserved in the folder of a run or sweep.

    A process of another machine may still need it: there it stays.
    """
    for place in (folder, *(file.parent for file in folder.glob("*/status.json"))):
        status = read_json(place / "status.json")
        if is_lost(status) and status.get("process") != os.getpid():
            atomic.release_space(place / "status.json")
    if is_abandoned_sweep(read_json(folder / "sweep.json")):
        atomic.release_space(folder / "sweep.json")


def read_final_record(file: Path, is_dead: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Returns a record that its process keeps writing; the last one where the process is dead.

    A process may write its end and exit between the first read and the look at the process.
    """
    record = read_json(file)
    return read_json(file) if is_dead(record) else record


def is_abandoned_sweep(record: Mapping[str, Any]) -> bool:
    """Returns whether a sweep has not ended, and its process is gone from this machine."""
    process = record.get("process", {})
    if record.get("ended") is not None:
        return False
    here = process.get("host") == socket.gethostname()
    return here and not is_same_process(process.get("pid"), process.get("started"))
