"""Resuming a sweep in its folder: jobs that are complete, and jobs that have to run.

``sweep.json`` lists the jobs; their outcomes are in the ``status.json`` of each.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from scalewise import regular_files
from scalewise.errors import EXIT_CODES, ConfigError, ConfigIssue, did_you_mean
from scalewise.launch import locks, slurm_cli
from scalewise.launch.config_hash import config_hash, hash_of_folder, is_same_job
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import Result, attempt_folders
from scalewise.launch.locks import FolderLock, InUseError
from scalewise.run_files import load_json, read_json
from scalewise.tracking.sweep_record import (
    is_running,
    is_same_process,
    release_reserved,
    sweep_start,
)
from scalewise.typed_override import command_line

RETRYABLE_STATUSES = tuple(status for status in EXIT_CODES if status != "ok")
"""Statuses that are final unless ``retry`` contains them."""


@dataclass(frozen=True)
class ResumeRequest:
    """Request of ``resume_sweep=DIR|last retry=failed,timeout``."""

    sweep: str
    """Folder of the sweep, or ``last``."""
    retry: tuple[str, ...] = ()
    """Statuses of jobs to run again."""

    def reject_single_run(self) -> NoReturn:
        """Raise ``ConfigError``: the command is a single run."""
        fix = "for a run: resume=last or resume=DIR; for a sweep: add sweep=NAME, or -m"
        raise ConfigError.for_key("resume_sweep", self.sweep, "the command is a single run", fix)


@dataclass(frozen=True)
class EarlierJob:
    """Job of the sweep to resume."""

    number: int
    """Number in the sweep."""
    config_hash: str
    """Config hash."""
    varied: Mapping[str, str]
    """Overrides by key that differ between the jobs of the sweep."""
    planned_folder: Path
    """Folder of the first attempt; later ones are numbered: ``3``, ``3-2``."""
    attempts: tuple[Path, ...]
    """Folders of the attempts, the newest first."""
    result: Result | None
    """Final result; None if the job has to run."""


def parse_resume_request(arguments: Sequence[str]) -> tuple[ResumeRequest | None, list[str]]:
    """Split the arguments of a command line into the resume request and other arguments."""
    pairs = [
        argument.split("=", 1)
        for argument in arguments
        if argument.startswith(("resume_sweep=", "retry="))
    ]
    other_arguments = [
        argument for argument in arguments if not argument.startswith(("resume_sweep=", "retry="))
    ]
    values = dict(pairs)
    retry = tuple(filter(None, values.get("retry", "").split(",")))
    issues = [
        ConfigIssue(
            "retry",
            status,
            "is not a status that can be retried",
            did_you_mean(status, RETRYABLE_STATUSES),
        )
        for status in retry
        if status not in RETRYABLE_STATUSES
    ]
    if pairs and not values.get("resume_sweep"):
        fix = "add resume_sweep=last, or resume_sweep=DIR"
        issues.append(ConfigIssue("", "", "no sweep to resume is given", fix))
    if issues:
        raise ConfigError(issues)
    return (ResumeRequest(values["resume_sweep"], retry) if pairs else None), other_arguments


def resumed_folder(sweep: str, new_folder: Path) -> Path:
    """Folder of the sweep to resume; ``new_folder`` is the folder that a new sweep would have.

    Raises ``ConfigError`` if there is none, or if it is still running.
    """
    if sweep == "last":
        folders = [file.parent for file in new_folder.parent.glob("*/sweep.json")]
        folder = max(folders, key=sweep_start, default=None)
        if folder is None:
            reason = f"there is no sweep under {new_folder.parent}"
            raise ConfigError.for_key("resume_sweep", sweep, reason, "set resume_sweep=DIR")
    else:
        folder = regular_files.expand_home(sweep).absolute()
    record = load_json(folder / "sweep.json")
    if not record:
        reason = "contains no readable sweep.json"
        raise ConfigError.for_key(
            "resume_sweep", sweep, f"{folder} {reason}", "set resume_sweep to the folder of a sweep"
        )
    if any(not {"config_hash", "planned_folder"} <= set(entry) for entry in record.get("jobs", [])):
        reason = f"{folder} was written by a version that could not resume sweeps"
        raise ConfigError.for_key("resume_sweep", sweep, reason, "run the sweep from scratch")
    _reject_running(sweep, folder, record)
    _reject_queued(sweep, folder)
    release_reserved(folder)
    return folder


def lock_sweep(key: str, value: str, folder: Path) -> FolderLock:
    """Lock the sweep in ``folder``. Raises ``ConfigError`` if another process uses it.

    ``key`` and ``value`` are the override that selected the folder.
    """
    try:
        return locks.acquire_lock(folder)
    except InUseError as error:
        reason = f"{folder} is in use by {error.owner}"
        fix = f"wait for it, or end it: {error.owner.kill_command}"
        raise ConfigError.for_key(key, value, reason, fix) from None


def earlier_jobs(folder: Path, retry: Sequence[str]) -> list[EarlierJob]:
    """Jobs of the sweep in ``folder``, by number."""
    record = read_json(folder / "sweep.json")
    return [_earlier_job(folder, entry, retry) for entry in record.get("jobs", [])]


def match_jobs(
    requested_jobs: Sequence[tuple[str, Mapping[str, str]]], known_jobs: Sequence[EarlierJob]
) -> list[EarlierJob | None]:
    """Known job of each requested job, by config hash and varied overrides; each used once."""
    remaining_jobs = list(known_jobs)
    matches: list[EarlierJob | None] = []
    for digest, varied in requested_jobs:
        candidates = (
            job
            for job in remaining_jobs
            if job.config_hash == digest and is_same_job(job.varied, varied)
        )
        job = next(candidates, None)
        if job is not None:
            remaining_jobs.remove(job)
        matches.append(job)
    return matches


def renumber_tasks(
    tasks: Sequence[SweepTask], known_jobs: list[EarlierJob], folder: Path
) -> tuple[list[SweepTask], dict[int, Result]]:
    """Tasks with their numbers in ``folder``, and the results that are kept.

    New jobs get the next numbers. Removes the matched jobs from ``known_jobs``.
    """
    requested_jobs = [(config_hash(task.job_spec.run), task.job_spec.varied) for task in tasks]
    matches = match_jobs(requested_jobs, known_jobs)
    numbers = (entry["number"] for entry in read_json(folder / "sweep.json").get("jobs", []))
    next_number = 1 + max(numbers, default=-1)
    renumbered_tasks: list[SweepTask] = []
    kept_results: dict[int, Result] = {}
    for task, job in zip(tasks, matches, strict=True):
        if job is None:
            renumbered_tasks.append(
                replace(task, number=next_number, folder=folder / str(next_number))
            )
            next_number += 1
            continue
        known_jobs.remove(job)
        job_spec = replace(task.job_spec, attempts=job.attempts)
        renumbered_tasks.append(SweepTask(job.number, job_spec, job.planned_folder))
        if job.result is not None:
            kept_results[job.number] = job.result
    return renumbered_tasks, kept_results


def _earlier_job(folder: Path, entry: Mapping[str, Any], retry: Sequence[str]) -> EarlierJob:
    planned_folder = folder / entry["planned_folder"]
    # The folder may contain another job, e.g. in a copied sweep.
    config_hash = entry["config_hash"]
    attempts = tuple(
        attempt
        for attempt in attempt_folders(planned_folder)
        if hash_of_folder(attempt) == config_hash
    )
    results = [_kept_result(attempt) for attempt in attempts]
    newest_result = results[0] if results else None
    result = next((result for result in results if result.status == "ok"), newest_result)
    if result is None and entry["status"] == "refused":  # rejected before it had a folder
        reason = entry.get("reason", "")
        result = Result("refused", reason, EXIT_CODES["refused"], planned_folder, {})
    is_final = result is not None and (result.status == "ok" or result.status in RETRYABLE_STATUSES)
    if is_final and result is not None and result.status in retry:
        is_final = False
    return EarlierJob(
        entry["number"],
        config_hash,
        entry["varied"],
        planned_folder,
        attempts,
        result if is_final else None,
    )


def _kept_result(attempt: Path) -> Result:
    status = read_json(attempt / "status.json")
    code = status.get("exit_code")
    return Result(
        status.get("status", "running"),
        status.get("reason", ""),
        1 if code is None else code,
        attempt,
        read_json(attempt / "summary.json"),
    )


def _reject_running(sweep: str, folder: Path, record: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the sweep process or one of the jobs is running."""
    process = record.get("process", {})
    if not {"pid", "host", "started"} <= set(process):
        reason = f"{folder / 'sweep.json'} does not record its process"
        raise ConfigError.for_key("resume_sweep", sweep, reason, "restore it from a copy")
    host = process["host"]
    if record.get("ended") is None and host != socket.gethostname():
        reason = f"{folder} was not completed by its process {process['pid']} on {host}"
        fix = f"resume it on that host; if the process has ended, set host in {folder}/sweep.json"
        raise ConfigError.for_key("resume_sweep", sweep, reason, fix)
    if host != socket.gethostname():
        return
    running_jobs = {}
    if record.get("ended") is None and is_same_process(process["pid"], process["started"]):
        running_jobs[process["pid"]] = "the sweep"
    for entry in record.get("jobs", []):
        for attempt in attempt_folders(folder / entry["planned_folder"]):
            status = read_json(attempt / "status.json")
            if status.get("host") == host and is_running(status):
                running_jobs.setdefault(status["process"], f"job {entry['number']}")
    if running_jobs:
        (pid, name), *_ = running_jobs.items()
        reason = f"{name} is still running, as process {pid}"
        raise ConfigError.for_key(
            "resume_sweep", sweep, reason, f"wait for it, or end it: kill {pid}"
        )


def _reject_queued(sweep: str, folder: Path) -> None:
    """Raise ``ConfigError`` if Slurm has jobs of the sweep, which would run twice."""
    job_ids = slurm_cli.sweep_job_ids(folder)
    if not job_ids or not slurm_cli.has_slurm():
        return
    states = slurm_cli.job_states()
    remaining_ids = [job for job in job_ids.values() if states is None or job in states]
    if remaining_ids:
        arrays = " ".join(sorted({job.partition("_")[0] for job in remaining_ids}))
        noun = "job" if len(remaining_ids) == 1 else "jobs"
        reason = f"Slurm still has {len(remaining_ids)} {noun} of the sweep, in arrays {arrays}"
        if states is None:
            reason = (
                f"Slurm does not respond, and may still have jobs of the sweep, in arrays {arrays}"
            )
        fix = f"wait for them ({command_line('status', [folder])}), or end them: scancel {arrays}"
        raise ConfigError.for_key("resume_sweep", sweep, reason, fix)
