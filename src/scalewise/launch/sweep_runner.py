"""The jobs of a sweep, and the record of them that is true at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise import atomic
from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.failures import report_errors
from scalewise.launch import locks, signals
from scalewise.launch.config_hash import config_hash
from scalewise.launch.executor import INTERRUPTED, Executor, SweepTask, failed_result
from scalewise.launch.job import Result
from scalewise.launch.locks import FolderLock, InUseError, process_identity
from scalewise.launch.sweep_resume import earlier_jobs
from scalewise.tracking.run_files import read_json, write_json

RESERVED_BYTES = 65536
"""Bytes reserved for reasons that jobs end for, beyond twice the record as it begins."""


def execute_all(
    tasks: Sequence[SweepTask],
    folder: Path,
    executor: Executor,
    *,
    command: str,
    question: str,
    on_start: Callable[[SweepTask, int], None],
    on_end: Callable[[SweepTask, Result], None],
    kept_results: Mapping[int, Result] | None = None,
) -> list[Result]:
    """Runs jobs into their folders and returns how each ended; none stops the others.

    ``kept_results`` holds the results of jobs that ended before, by number: those do not run. Keeps
    ``sweep.json`` in ``folder`` true at any moment. A signal ends the sweep: what had not begun
    is noted as ``interrupted``. Where the engine refuses them all, the record is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left: dict[str, Any] = read_json(folder / "sweep.json")
    record = _sweep_record(folder, left, command, question)
    results = dict(kept_results or {})
    rows = {row["number"]: row for row in record["jobs"]}
    for task in tasks:
        rows[task.number] = _waiting_row(task, folder)
        if task.number in results:
            _note_result(rows[task.number], results[task.number], folder)
    record["jobs"] = [rows[number] for number in sorted(rows)]
    record["varying"] = _varying_values([row["varied"] for row in record["jobs"]])

    def began(task: SweepTask) -> None:
        rows[task.number]["status"] = "running"
        _write_record(folder, record)
        on_start(task, len(tasks))

    ended: list[Result] = []
    left_to_run = [task for task in tasks if task.number not in results]
    try:
        with signals.raise_on_signals("between the jobs of the sweep"):
            _write_first_record(folder, record)
            for task, result in executor.iter_results(left_to_run, began):
                ended.append(result)
                results[task.number] = result
                _note_result(rows[task.number], result, folder)
                _write_record(folder, record)
                with report_errors(f"job {task.number} is not told of"):
                    on_end(task, result)
    except ConfigError:
        atomic.release_space(folder / "sweep.json")
        if not ended:
            _restore_record(folder, left)
        raise
    except Interrupted:
        for row in rows.values():
            if row["status"] == "waiting":
                row["status"] = "interrupted"
        _write_record(folder, record)
        atomic.release_space(folder / "sweep.json")
        raise
    except ScalewiseError:
        atomic.release_space(folder / "sweep.json")
        raise
    except Exception as error:  # of the engine, and so of every job that it has not ended
        for task in left_to_run:
            if task.number not in results:
                results[task.number] = failed_result(task, error)
                _note_result(rows[task.number], results[task.number], folder)
    stopped = next((result for result in ended if result.exit_code in INTERRUPTED), None)
    for task in tasks:
        if task.number not in results:
            assert stopped is not None, f"job {task.number} has no result"
            rows[task.number]["status"] = "interrupted"
            results[task.number] = Result(
                "interrupted", stopped.reason, stopped.exit_code, task.folder, {}
            )
    record["ended"] = _now()
    _write_record(folder, record)
    atomic.release_space(folder / "sweep.json")
    return [results[task.number] for task in tasks]


def claim_sweep_folder(folder: Path) -> FolderLock:
    """Makes and locks ``folder``, or a numbered one beside it, where no other sweep is."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError.for_key("hydra.sweep.dir", folder, "is a file", "give a folder")
    for number in range(1, 1000):
        own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        new = not own.exists()
        try:
            own.mkdir(parents=True, exist_ok=not new)
            lock = locks.acquire_lock(own)
        except (FileExistsError, InUseError):  # another sweep was faster
            continue
        except OSError as error:
            reason, fix = f"cannot be made: {error.strerror}", "run in another folder"
            raise ConfigError.for_key("hydra.sweep.dir", own, reason, fix) from error
        if (new or lock.is_held) and not (own / "sweep.json").exists():
            return lock
        lock.release()
    raise ConfigError.for_key("hydra.sweep.dir", folder, "holds a sweep already", "give another")


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with report_errors(f"sweep.json of {folder} stays as it is"):
        write_json(folder / "sweep.json", record)


def _write_first_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes the record and reserves disk space to write it again; raises ``ConfigError``."""
    file = folder / "sweep.json"
    try:
        atomic.reserve_space(file, RESERVED_BYTES + 2 * len(json.dumps(record, default=str)))
        write_json(file, record)
    except OSError as error:
        if (lacking := atomic.disk_full_reason(error)) is None:
            raise
        raise ConfigError.for_key("hydra.sweep.dir", folder, *lacking) from error


def _restore_record(folder: Path, previous_record: dict[str, Any]) -> None:
    """Makes the record what it was before a sweep of which no job may run."""
    if previous_record:
        write_json(folder / "sweep.json", previous_record)
    else:
        (folder / "sweep.json").unlink(missing_ok=True)


def _sweep_record(
    folder: Path, previous_record: dict[str, Any], command: str, question: str
) -> dict[str, Any]:
    """Returns the sweep's record, as it was ``previous_record`` or new, under way in this
    process."""
    begun: dict[str, Any] = {
        "name": folder.parent.name,
        "question": question,
        "command": command,
        "verb": "train",
        "started": _now(),
        "reference": None,
        "jobs": [],
    }
    now = {"question": question, "command": command, "ended": None, "process": process_identity()}
    if previous_record and previous_record["process"] != now["process"]:
        _update_from_folders(previous_record["jobs"], folder)
    return {**begun, **previous_record, **now}


def _update_from_folders(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Makes rows that another process has left true, as the folders of its jobs have it."""
    for row, job in zip(rows, earlier_jobs(folder, ()), strict=True):
        if job.result is not None:
            _note_result(row, job.result, folder)
        elif row["status"] in ("running", "waiting"):
            row["status"] = "interrupted"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _waiting_row(task: SweepTask, folder: Path) -> dict[str, Any]:
    """Returns the row of a job that waits; beside its folder the one that a second attempt gets."""
    place = str(task.folder.relative_to(folder))
    return {
        "number": task.number,
        "folder": place,
        "planned_folder": place,
        "config_hash": config_hash(task.job_spec.run),
        "overrides": list(task.job_spec.run.overrides),
        "varied": dict(task.job_spec.varied),
        "status": "waiting",
    }


def _note_result(row: dict[str, Any], result: Result, folder: Path) -> None:
    row["folder"] = str(result.folder.relative_to(folder))
    row["status"] = result.status
    if result.reason:
        row["reason"] = result.reason


def _varying_values(varied: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for values in varied for key in values)
    return {
        key: list(dict.fromkeys(values[key] for values in varied if key in values)) for key in keys
    }
