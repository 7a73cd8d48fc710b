"""Outcomes of the jobs of a search, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalewise.run_files import read_json

UNFINISHED = ("waiting", "running", "interrupted")
"""Statuses of jobs that were stopped from outside: by a signal or a crash of the machine."""


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome and metrics of the job of a trial."""

    status: str
    """Status of the job."""
    reason: str = ""
    """Reason of the status; empty for ``ok``."""
    folder: Path | None = None
    """Folder of the run; None if the job has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite metrics of ``summary.json``."""

    @property
    def is_lost(self) -> bool:
        """Whether the job was stopped from outside, so that its trial has to run again."""
        return self.status in UNFINISHED


def sweep_jobs(sweep: Path) -> list[dict[str, Any]]:
    """Job entries of ``sweep.json``; empty without that file."""
    jobs: list[dict[str, Any]] = read_json(sweep / "sweep.json").get("jobs", [])
    return jobs


def job_outcome(sweep: Path, number: int) -> TrialOutcome:
    """Outcome of job ``number`` of a sweep; its status is ``waiting`` if there is no such job.

    ``status.json`` of the job takes precedence over ``sweep.json``, which may be older.
    """
    entries = [job for job in sweep_jobs(sweep) if job["number"] == number]
    if not entries:
        return TrialOutcome("waiting")
    folder = sweep / entries[-1]["folder"]
    status = read_json(folder / "status.json")
    if not status:
        return TrialOutcome(entries[-1]["status"])
    metrics = read_json(folder / "summary.json").get("metrics", {})
    return TrialOutcome(
        status.get("status", "failed"),
        status.get("reason", ""),
        folder,
        {key: float(value) for key, value in metrics.items() if value is not None},
    )
