"""Commands of Slurm, without its accounting database, which many clusters do not have."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scalewise.run_files import read_json

FOLDER, JOBS = "slurm", "jobs.json"
"""Folder of job specs and logs in a sweep folder, and its file of Slurm IDs."""
COMMAND_TIMEOUT_S, MAX_ATTEMPTS = 30.0, 3
"""Time limit of a Slurm command, in seconds, and maximum number of attempts."""


def has_slurm() -> bool:
    """Whether the commands of Slurm are installed."""
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


def job_states() -> dict[str, str] | None:
    """States of the unfinished jobs of this user by Slurm ID (``12_0``).

    States are Slurm's: PENDING, RUNNING, COMPLETING, ... None if Slurm does not respond.
    """
    output = _run_slurm_command("squeue", "--noheader", "--me", "--array", "--format=%F_%K %T")
    if output is None:
        return None
    return dict(line.split() for line in output.splitlines() if len(line.split()) == 2)


def sweep_job_ids(folder: Path) -> dict[str, str]:
    """Slurm IDs of the jobs of a sweep, by job number."""
    return {number: str(job) for number, job in read_json(folder / FOLDER / JOBS).items()}


def job_facts(job: str) -> dict[str, str]:
    """Fields of ``scontrol show job``, available for minutes after the job ended; else empty."""
    output = _run_slurm_command("scontrol", "--oneliner", "show", "job", job) or ""
    return dict(field.split("=", 1) for field in output.split() if "=" in field)


def requeue_job(job: str) -> bool:
    """Requeue a job, which ends its processes; returns whether Slurm accepts it."""
    return _run_slurm_command("scontrol", "requeue", job) is not None


def cancel_jobs(jobs: Iterable[str]) -> None:
    """Cancel pending or running jobs."""
    _run_slurm_command("scancel", *jobs)


def _run_slurm_command(*command: str) -> str | None:
    """Output of a command; None if all attempts fail."""
    for attempt in range(MAX_ATTEMPTS):
        time.sleep(attempt)
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(  # noqa: S603 (Slurm commands with Slurm IDs)
                command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
            ).stdout
    return None
