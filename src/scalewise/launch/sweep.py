"""The jobs of a sweep, and the record of them that is true at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise import atomic
from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.failures import survived
from scalewise.launch import locks, signals
from scalewise.launch.config_hash import config_hash
from scalewise.launch.engine import INTERRUPTED, Engine, Task, failed
from scalewise.launch.job import Result
from scalewise.launch.locks import FolderLock, InUseError, this_process
from scalewise.launch.resumed_sweep import earlier
from scalewise.tracking.files import read_json, write_json

RESERVED_BYTES = 65536
"""Bytes reserved for reasons that jobs end for, beyond twice the record as it begins."""


def execute_all(
    tasks: Sequence[Task],
    folder: Path,
    engine: Engine,
    *,
    command: str,
    question: str,
    announce: Callable[[Task, int], None],
    report: Callable[[Task, Result], None],
    kept: Mapping[int, Result] | None = None,
) -> list[Result]:
    """Runs jobs into their folders and returns how each ended; none stops the others.

    ``kept`` holds the results of jobs that ended before, by number: those do not run. Keeps
    ``sweep.json`` in ``folder`` true at any moment. A signal ends the sweep: what had not begun
    is noted as ``interrupted``. Where the engine refuses them all, the record is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left: dict[str, Any] = read_json(folder / "sweep.json")
    record = _record(folder, left, command, question)
    results = dict(kept or {})
    rows = {row["number"]: row for row in record["jobs"]}
    for task in tasks:
        rows[task.number] = _planned(task, folder)
        if task.number in results:
            _note(rows[task.number], results[task.number], folder)
    record["jobs"] = [rows[number] for number in sorted(rows)]
    record["varying"] = _varying([row["varied"] for row in record["jobs"]])

    def began(task: Task) -> None:
        rows[task.number]["status"] = "running"
        _write(folder, record)
        announce(task, len(tasks))

    ended: list[Result] = []
    left_to_run = [task for task in tasks if task.number not in results]
    try:
        with signals.raised("between the jobs of the sweep"):
            _first_write(folder, record)
            for task, result in engine.results(left_to_run, began):
                ended.append(result)
                results[task.number] = result
                _note(rows[task.number], result, folder)
                _write(folder, record)
                with survived(f"job {task.number} is not told of"):
                    report(task, result)
    except ConfigError:
        atomic.release(folder / "sweep.json")
        if not ended:
            _restore(folder, left)
        raise
    except Interrupted:
        for row in rows.values():
            if row["status"] == "waiting":
                row["status"] = "interrupted"
        _write(folder, record)
        atomic.release(folder / "sweep.json")
        raise
    except ScalewiseError:
        atomic.release(folder / "sweep.json")
        raise
    except Exception as error:  # of the engine, and so of every job that it has not ended
        for task in left_to_run:
            if task.number not in results:
                results[task.number] = failed(task, error)
                _note(rows[task.number], results[task.number], folder)
    stopped = next((result for result in ended if result.exit_code in INTERRUPTED), None)
    for task in tasks:
        if task.number not in results:
            assert stopped is not None, f"job {task.number} has no result"
            rows[task.number]["status"] = "interrupted"
            results[task.number] = Result(
                "interrupted", stopped.reason, stopped.exit_code, task.folder, {}
            )
    record["ended"] = _now()
    _write(folder, record)
    atomic.release(folder / "sweep.json")
    return [results[task.number] for task in tasks]


def claimed(folder: Path) -> FolderLock:
    """Makes and locks ``folder``, or a numbered one beside it, where no other sweep is."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError.one("hydra.sweep.dir", folder, "is a file", "give a folder")
    for number in range(1, 1000):
        own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        new = not own.exists()
        try:
            own.mkdir(parents=True, exist_ok=not new)
            lock = locks.acquire(own)
        except (FileExistsError, InUseError):  # another sweep was faster
            continue
        except OSError as error:
            reason, cure = f"cannot be made: {error.strerror}", "run in another folder"
            raise ConfigError.one("hydra.sweep.dir", own, reason, cure) from error
        if (new or lock.held) and not (own / "sweep.json").exists():
            return lock
        lock.release()
    raise ConfigError.one("hydra.sweep.dir", folder, "holds a sweep already", "give another")


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    with survived(f"sweep.json of {folder} stays as it is"):
        write_json(folder / "sweep.json", record)


def _first_write(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes the record and reserves disk space to write it again; raises ``ConfigError``."""
    file = folder / "sweep.json"
    try:
        atomic.reserve(file, RESERVED_BYTES + 2 * len(json.dumps(record, default=str)))
        write_json(file, record)
    except OSError as error:
        if (lacking := atomic.lack_of_space(error)) is None:
            raise
        raise ConfigError.one("hydra.sweep.dir", folder, *lacking) from error


def _restore(folder: Path, left: dict[str, Any]) -> None:
    """Makes the record what it was before a sweep of which no job may run."""
    if left:
        write_json(folder / "sweep.json", left)
    else:
        (folder / "sweep.json").unlink(missing_ok=True)


def _record(folder: Path, left: dict[str, Any], command: str, question: str) -> dict[str, Any]:
    """Returns the sweep's record, as it was ``left`` or new, under way in this process."""
    begun: dict[str, Any] = {
        "name": folder.parent.name,
        "question": question,
        "command": command,
        "verb": "train",
        "started": _now(),
        "reference": None,
        "jobs": [],
    }
    now = {"question": question, "command": command, "ended": None, "process": this_process()}
    if left and left["process"] != now["process"]:
        _settle(left["jobs"], folder)
    return {**begun, **left, **now}


def _settle(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Makes rows that another process has left true, as the folders of its jobs have it."""
    for row, job in zip(rows, earlier(folder, ()), strict=True):
        if job.result is not None:
            _note(row, job.result, folder)
        elif row["status"] in ("running", "waiting"):
            row["status"] = "interrupted"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _planned(task: Task, folder: Path) -> dict[str, Any]:
    """Returns the row of a job that waits; beside its folder the one that a second attempt gets."""
    place = str(task.folder.relative_to(folder))
    return {
        "number": task.number,
        "folder": place,
        "planned_folder": place,
        "config_hash": config_hash(task.order.run),
        "overrides": list(task.order.run.overrides),
        "varied": dict(task.order.varied),
        "status": "waiting",
    }


def _note(row: dict[str, Any], result: Result, folder: Path) -> None:
    row["folder"] = str(result.folder.relative_to(folder))
    row["status"] = result.status
    if result.reason:
        row["reason"] = result.reason


def _varying(varied: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for values in varied for key in values)
    return {
        key: list(dict.fromkeys(values[key] for values in varied if key in values)) for key in keys
    }
