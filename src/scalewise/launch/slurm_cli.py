"""What Slurm says of its jobs, asked without its accounting: many clusters keep none."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scalewise.tracking.run_files import read_json

FOLDER, JOBS = "slurm", "jobs.json"
"""In a sweep's folder: orders, logs, and which job of Slurm's (``12_0``) each of its jobs is."""
WAIT, ATTEMPTS = 30.0, 3
"""Seconds that one question may take, and how often it is asked of a controller that is busy."""


def has_slurm() -> bool:
    """Returns whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


def job_states() -> dict[str, str] | None:
    """Returns the state of every job of this user that has not ended, by id (``12_0``).

    States are Slurm's: PENDING, RUNNING, COMPLETING... None where Slurm does not answer.
    """
    said = _run_slurm_command("squeue", "--noheader", "--me", "--array", "--format=%F_%K %T")
    if said is None:
        return None
    return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)


def sweep_job_ids(folder: Path) -> dict[str, str]:
    """Returns Slurm's id of each job that a sweep handed in, by its number."""
    return {number: str(job) for number, job in read_json(folder / FOLDER / JOBS).items()}


def job_facts(job: str) -> dict[str, str]:
    """Returns what Slurm knows of a job, for minutes after it ended; empty where it does not."""
    said = _run_slurm_command("scontrol", "--oneliner", "show", "job", job) or ""
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


def requeue_job(job: str) -> bool:
    """Lets a job wait in the queue again, which ends its processes; returns whether it will."""
    return _run_slurm_command("scontrol", "requeue", job) is not None


def cancel_jobs(jobs: Iterable[str]) -> None:
    """Ends jobs, waiting or running."""
    _run_slurm_command("scancel", *jobs)


def _run_slurm_command(*command: str) -> str | None:
    """Returns what a command says; None where it fails again and again."""
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(  # noqa: S603 (Slurm's commands, and ids that it gave)
                command, capture_output=True, text=True, timeout=WAIT, check=True
            ).stdout
    return None
