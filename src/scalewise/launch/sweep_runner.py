"""Execution of the jobs of a sweep, and its record ``sweep.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
from scalewise.run_files import read_json, write_json
from scalewise.sweep_question import SweepQuestion

RESERVED_BYTES = 65536
"""Disk space reserved for the reasons of outcomes, in bytes, in addition to twice the record."""


def execute_all(
    tasks: Sequence[SweepTask],
    folder: Path,
    executor: Executor,
    *,
    command: str,
    question: SweepQuestion,
    on_start: Callable[[SweepTask, int], None],
    on_end: Callable[[SweepTask, Result], None],
    kept_results: Mapping[int, Result] | None = None,
    cases: Mapping[str, object] | None = None,
) -> list[Result]:
    """Run the jobs in their folders and return their results; a failed job does not stop others.

    ``kept_results``: results of jobs that have ended before, by number; those do not run.
    ``cases``: expectations by case, of a sweep of cases; recorded with the sweep. Updates
    ``sweep.json`` in ``folder`` after every change. A signal ends the sweep, with status
    ``interrupted`` for jobs that have not started. If the executor rejects all jobs, the previous
    record is restored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    previous_record: dict[str, Any] = read_json(folder / "sweep.json")
    record = _sweep_record(folder, previous_record, command, question)
    if cases:
        record["cases"] = {**record.get("cases", {}), **cases}
    results = dict(kept_results or {})
    entries = {entry["number"]: entry for entry in record["jobs"]}
    for task in tasks:
        entries[task.number] = _waiting_entry(task, folder)
        if task.number in results:
            _note_result(entries[task.number], results[task.number], folder)
    record["jobs"] = [entries[number] for number in sorted(entries)]
    record["varying"] = _varying_values([entry["varied"] for entry in record["jobs"]])

    def start_job(task: SweepTask) -> None:
        entries[task.number]["status"] = "running"
        _write_record(folder, record)
        on_start(task, len(tasks))

    new_results: list[Result] = []
    pending_tasks = [task for task in tasks if task.number not in results]
    try:
        with signals.raise_on_signals("between the jobs of the sweep"):
            _write_first_record(folder, record)
            for task, result in executor.iter_results(pending_tasks, start_job):
                new_results.append(result)
                results[task.number] = result
                _note_result(entries[task.number], result, folder)
                _write_record(folder, record)
                with report_errors(f"the result of job {task.number} is not printed"):
                    on_end(task, result)
    except ConfigError:
        atomic.release_space(folder / "sweep.json")
        if not new_results:
            _restore_record(folder, previous_record)
        raise
    except Interrupted:
        for entry in entries.values():
            if entry["status"] == "waiting":
                entry["status"] = "interrupted"
        _write_record(folder, record)
        atomic.release_space(folder / "sweep.json")
        raise
    except ScalewiseError:
        atomic.release_space(folder / "sweep.json")
        raise
    except Exception as error:  # an error of the executor fails all unfinished jobs
        for task in pending_tasks:
            if task.number not in results:
                results[task.number] = failed_result(task, error)
                _note_result(entries[task.number], results[task.number], folder)
    interrupted_result = next(
        (result for result in new_results if result.exit_code in INTERRUPTED), None
    )
    for task in tasks:
        if task.number not in results:
            assert interrupted_result is not None, f"job {task.number} has no result"
            entries[task.number]["status"] = "interrupted"
            results[task.number] = Result(
                "interrupted",
                interrupted_result.reason,
                interrupted_result.exit_code,
                task.folder,
                {},
            )
    record["ended"] = _now()
    _write_record(folder, record)
    atomic.release_space(folder / "sweep.json")
    return [results[task.number] for task in tasks]


def claim_sweep_folder(folder: Path) -> FolderLock:
    """Create and lock ``folder``, or a numbered one next to it if it contains a sweep."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError.for_key("hydra.sweep.dir", folder, "is a file", "set a folder")
    for number in range(1, 1000):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        is_new = not candidate.exists()
        try:
            candidate.mkdir(parents=True, exist_ok=not is_new)
            lock = locks.acquire_lock(candidate)
        except (FileExistsError, InUseError):  # another sweep has claimed it
            continue
        except OSError as error:
            reason, fix = f"cannot be created: {error.strerror}", "run in another folder"
            raise ConfigError.for_key("hydra.sweep.dir", candidate, reason, fix) from error
        if (is_new or lock.is_held) and not (candidate / "sweep.json").exists():
            return lock
        lock.release()
    raise ConfigError.for_key(
        "hydra.sweep.dir", folder, "already contains a sweep", "set another folder"
    )


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with report_errors(f"sweep.json of {folder} is not updated"):
        write_json(folder / "sweep.json", record)


def _write_first_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record and reserve disk space for its updates. Raises ``ConfigError``."""
    file = folder / "sweep.json"
    try:
        atomic.reserve_space(file, RESERVED_BYTES + 2 * len(json.dumps(record, default=str)))
        write_json(file, record)
    except OSError as error:
        if (reason_and_fix := atomic.disk_full_reason(error)) is None:
            raise
        raise ConfigError.for_key("hydra.sweep.dir", folder, *reason_and_fix) from error


def _restore_record(folder: Path, previous_record: dict[str, Any]) -> None:
    """Restore the record before a sweep without valid jobs."""
    if previous_record:
        write_json(folder / "sweep.json", previous_record)
    else:
        (folder / "sweep.json").unlink(missing_ok=True)


def _sweep_record(
    folder: Path, previous_record: dict[str, Any], command: str, question: SweepQuestion
) -> dict[str, Any]:
    """Record of the running sweep, updated from ``previous_record`` or new."""
    new_record: dict[str, Any] = {
        "name": folder.parent.name,
        "question": question.question,
        "command": command,
        "verb": "train",
        "started": _now(),
        "reference": None,
        "jobs": [],
    }
    current_values = {
        **{key: text for key, text in asdict(question).items() if text or key == "question"},
        "command": command,
        "ended": None,
        "process": process_identity(),
    }
    if previous_record and previous_record["process"] != current_values["process"]:
        _update_from_folders(previous_record["jobs"], folder)
    return {**new_record, **previous_record, **current_values}


def _update_from_folders(entries: Sequence[dict[str, Any]], folder: Path) -> None:
    """Update entries of an earlier process from the folders of the jobs."""
    for entry, job in zip(entries, earlier_jobs(folder, ()), strict=True):
        if job.result is not None:
            _note_result(entry, job.result, folder)
        elif entry["status"] in ("running", "waiting"):
            entry["status"] = "interrupted"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _waiting_entry(task: SweepTask, folder: Path) -> dict[str, Any]:
    """Entry of a waiting job, with its folder and that of the first attempt."""
    relative_folder = str(task.folder.relative_to(folder))
    return {
        "number": task.number,
        "folder": relative_folder,
        "planned_folder": relative_folder,
        "config_hash": config_hash(task.job_spec.run),
        "overrides": list(task.job_spec.run.overrides),
        "varied": dict(task.job_spec.varied),
        "status": "waiting",
    }


def _note_result(entry: dict[str, Any], result: Result, folder: Path) -> None:
    entry["folder"] = str(result.folder.relative_to(folder))
    entry["status"] = result.status
    if result.reason:
        entry["reason"] = result.reason


def _varying_values(varied: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for values in varied for key in values)
    return {
        key: list(dict.fromkeys(values[key] for values in varied if key in values)) for key in keys
    }
