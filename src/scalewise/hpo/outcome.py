"""How a job of a sweep ended, as its folder tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalewise.tracking.run_files import read_json

UNENDED = ("waiting", "running", "interrupted")
"""What a job that a person, a signal or a dead machine stopped may be called."""


@dataclass(frozen=True)
class TrialOutcome:
    """A job's end and what it measured."""

    status: str
    reason: str = ""
    folder: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers of ``summary.json`` by key."""

    @property
    def is_lost(self) -> bool:
        """Returns whether it did not end by itself, so that it says nothing of its settings."""
        return self.status in UNENDED


def sweep_jobs(sweep: Path) -> list[dict[str, Any]]:
    """Returns the jobs that ``sweep.json`` lists; none where there is no such file."""
    jobs: list[dict[str, Any]] = read_json(sweep / "sweep.json").get("jobs", [])
    return jobs


def job_outcome(sweep: Path, number: int) -> TrialOutcome:
    """Returns how job ``number`` of the sweep in that folder ended, ``waiting`` if unknown.

    The job's own ``status.json`` is believed before the sweep's list, which may be older.
    """
    found = [row for row in sweep_jobs(sweep) if row["number"] == number]
    if not found:
        return TrialOutcome("waiting")
    folder = sweep / found[-1]["folder"]
    status = read_json(folder / "status.json")
    if not status:
        return TrialOutcome(found[-1]["status"])
    metrics = read_json(folder / "summary.json").get("metrics", {})
    return TrialOutcome(
        status.get("status", "failed"),
        status.get("reason", ""),
        folder,
        {key: float(value) for key, value in metrics.items() if value is not None},
    )
