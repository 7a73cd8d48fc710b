"""A sweep that goes on in its folder: what of it is done, and what is missing.

``status.json`` of each job is the truth; ``sweep.json`` says which jobs there are.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from scalewise.config.suggestions import did_you_mean
from scalewise.errors import EXIT_CODES, ConfigError, ConfigIssue
from scalewise.launch import locks, slurm_cli
from scalewise.launch.config_hash import config_hash, hash_of_folder, is_same_job
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import Result, attempt_folders
from scalewise.launch.locks import FolderLock, InUseError
from scalewise.tracking.run_files import load_json, read_json
from scalewise.tracking.sweep_record import (
    is_running,
    is_same_process,
    release_reserved,
    sweep_start,
)
from scalewise.typed_override import command_line

RETRIED_STATUSES = tuple(status for status in EXIT_CODES if status != "ok")
"""Endings that are final, unless ``retry`` names them."""


@dataclass(frozen=True)
class ResumeRequest:
    """What ``resume_sweep=DIR|last retry=failed,timeout`` asks for."""

    sweep: str
    retry: tuple[str, ...] = ()

    def reject_single_run(self) -> NoReturn:
        """Raises ``ConfigError``: it was asked for with the line of a single run."""
        fix = "for a run: resume=last or resume=DIR; for a sweep: add sweep=NAME, or -m"
        raise ConfigError.for_key("resume_sweep", self.sweep, "this line is a single run", fix)


@dataclass(frozen=True)
class EarlierJob:
    """A job of the sweep as it was left."""

    number: int
    config_hash: str
    varied: Mapping[str, str]
    planned_folder: Path
    """The folder of its first attempt; others are numbered: ``3``, ``3-2``."""
    attempts: tuple[Path, ...]
    """The folders that there are, the newest first."""
    result: Result | None
    """How it ended for good; None where it is missing."""


def parse_resume_request(arguments: Sequence[str]) -> tuple[ResumeRequest | None, list[str]]:
    """Returns what the words of a command line ask for, and the other words."""
    mine = [
        word.split("=", 1) for word in arguments if word.startswith(("resume_sweep=", "retry="))
    ]
    rest = [word for word in arguments if not word.startswith(("resume_sweep=", "retry="))]
    given = dict(mine)
    retry = tuple(filter(None, given.get("retry", "").split(",")))
    issues = [
        ConfigIssue(
            "retry", status, "is no ending to try again", did_you_mean(status, RETRIED_STATUSES)
        )
        for status in retry
        if status not in RETRIED_STATUSES
    ]
    if mine and not given.get("resume_sweep"):
        fix = "add resume_sweep=last, or resume_sweep=DIR"
        issues.append(ConfigIssue("", "", "no sweep is named to go on with", fix))
    if issues:
        raise ConfigError(issues)
    return (ResumeRequest(given["resume_sweep"], retry) if mine else None), rest


def resumed_folder(sweep: str, new_folder: Path) -> Path:
    """Returns the folder of the sweep that is asked for; ``new_folder`` would be that of a new one.

    Raises ``ConfigError`` where there is none, or it still runs.
    """
    if sweep == "last":
        found = [file.parent for file in new_folder.parent.glob("*/sweep.json")]
        folder = max(found, key=sweep_start, default=None)
        if folder is None:
            reason = f"there is no sweep under {new_folder.parent}"
            raise ConfigError.for_key("resume_sweep", sweep, reason, "give its folder")
    else:
        folder = Path(sweep).expanduser().absolute()
    record = load_json(folder / "sweep.json")
    if not record:
        reason = "holds no readable sweep.json"
        raise ConfigError.for_key(
            "resume_sweep", sweep, f"{folder} {reason}", "give a sweep's folder"
        )
    if any(not {"config_hash", "planned_folder"} <= set(row) for row in record.get("jobs", [])):
        reason = f"{folder} was written by a version that could not resume sweeps"
        raise ConfigError.for_key("resume_sweep", sweep, reason, "run it anew")
    _reject_running(sweep, folder, record)
    _reject_queued(sweep, folder)
    release_reserved(folder)
    return folder


def lock_sweep(key: str, value: str, folder: Path) -> FolderLock:
    """Locks the sweep in ``folder``; raises ``ConfigError`` if another process drives it.

    ``key`` and ``value`` are the override that chose the folder.
    """
    try:
        return locks.acquire_lock(folder)
    except InUseError as error:
        reason = f"{folder} is driven by {error.owner}"
        fix = f"wait for it, or end it: {error.owner.kill_command}"
        raise ConfigError.for_key(key, value, reason, fix) from None


def earlier_jobs(folder: Path, retry: Sequence[str]) -> list[EarlierJob]:
    """Returns the jobs of the sweep in ``folder``, by number."""
    record = read_json(folder / "sweep.json")
    return [_earlier_job(folder, row, retry) for row in record.get("jobs", [])]


def match_jobs(
    requested_jobs: Sequence[tuple[str, Mapping[str, str]]], known_jobs: Sequence[EarlierJob]
) -> list[EarlierJob | None]:
    """Returns for each wanted job, by hash and what it varies, the one that it is; each once."""
    left = list(known_jobs)
    found: list[EarlierJob | None] = []
    for digest, varied in requested_jobs:
        fits = (
            job for job in left if job.config_hash == digest and is_same_job(job.varied, varied)
        )
        job = next(fits, None)
        if job is not None:
            left.remove(job)
        found.append(job)
    return found


def renumber_tasks(
    tasks: Sequence[SweepTask], known_jobs: list[EarlierJob], folder: Path
) -> tuple[list[SweepTask], dict[int, Result]]:
    """Returns the tasks under the numbers that they have in ``folder``, and results that are kept.

    A job that is new gets a further number. What is found is taken out of ``known_jobs``.
    """
    wanted = [(config_hash(task.job_spec.run), task.job_spec.varied) for task in tasks]
    found = match_jobs(wanted, known_jobs)
    numbers = (row["number"] for row in read_json(folder / "sweep.json").get("jobs", []))
    further = 1 + max(numbers, default=-1)
    own: list[SweepTask] = []
    kept: dict[int, Result] = {}
    for task, job in zip(tasks, found, strict=True):
        if job is None:
            own.append(replace(task, number=further, folder=folder / str(further)))
            further += 1
            continue
        known_jobs.remove(job)
        order = replace(task.job_spec, attempts=job.attempts)
        own.append(SweepTask(job.number, order, job.planned_folder))
        if job.result is not None:
            kept[job.number] = job.result
    return own, kept


def _earlier_job(folder: Path, row: Mapping[str, Any], retry: Sequence[str]) -> EarlierJob:
    planned = folder / row["planned_folder"]
    # A folder of this number may hold another job: of a copied sweep, or of two that shared it.
    digest = row["config_hash"]
    tries = tuple(
        attempt for attempt in attempt_folders(planned) if hash_of_folder(attempt) == digest
    )
    ended = [_kept_result(attempt) for attempt in tries]
    result = next((end for end in ended if end.status == "ok"), ended[0] if ended else None)
    if result is None and row["status"] == "refused":  # before it had a folder
        reason = row.get("reason", "")
        result = Result("refused", reason, EXIT_CODES["refused"], planned, {})
    final = result is not None and (result.status == "ok" or result.status in RETRIED_STATUSES)
    if final and result is not None and result.status in retry:
        final = False
    return EarlierJob(
        row["number"],
        digest,
        row["varied"],
        planned,
        tries,
        result if final else None,
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
    """Refuses a sweep whose process, or one of whose jobs, lives."""
    process = record.get("process", {})
    if not {"pid", "host", "started"} <= set(process):
        reason = f"{folder / 'sweep.json'} does not say which process ran it"
        raise ConfigError.for_key("resume_sweep", sweep, reason, "put a copy of it back")
    host = process["host"]
    if record.get("ended") is None and host != socket.gethostname():
        reason = f"{folder} was not ended by its process {process['pid']} on {host}"
        fix = f"go on with it there; if that process is gone, set host in {folder}/sweep.json"
        raise ConfigError.for_key("resume_sweep", sweep, reason, fix)
    if host != socket.gethostname():
        return
    living = {}
    if record.get("ended") is None and is_same_process(process["pid"], process["started"]):
        living[process["pid"]] = "it"
    for row in record.get("jobs", []):
        for attempt in attempt_folders(folder / row["planned_folder"]):
            status = read_json(attempt / "status.json")
            if status.get("host") == host and is_running(status):
                living.setdefault(status["process"], f"its job {row['number']}")
    if living:
        (pid, what), *_ = living.items()
        reason = f"{what} still runs, as process {pid}"
        raise ConfigError.for_key(
            "resume_sweep", sweep, reason, f"wait for it, or end it: kill {pid}"
        )


def _reject_queued(sweep: str, folder: Path) -> None:
    """Refuses a sweep of which Slurm has jobs: they would run twice."""
    known = slurm_cli.sweep_job_ids(folder)
    if not known or not slurm_cli.has_slurm():
        return
    states = slurm_cli.job_states()
    left = [job for job in known.values() if states is None or job in states]
    if left:
        arrays = " ".join(sorted({job.partition("_")[0] for job in left}))
        reason = f"Slurm still has {len(left)} of its jobs, of {arrays}"
        if states is None:
            reason = f"Slurm does not say whether it still has its jobs, of {arrays}"
        fix = f"wait for them ({command_line('status', [folder])}), or end them: scancel {arrays}"
        raise ConfigError.for_key("resume_sweep", sweep, reason, fix)
