"""Optuna storage of a study, and the file that links a job to its trial."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.run_files import read_json, write_json

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

SQLITE = (".db", ".sqlite", ".sqlite3")
TRIAL = "trial.json"


@dataclass(frozen=True)
class TrialLink:
    """Link from a job to its trial, with which the job reports metrics and is pruned."""

    storage: str
    """Path of the storage."""
    study: str
    """Name of the study."""
    trial: int
    """Number of the trial."""
    pruner: str
    """Name of the pruner."""
    metric: str
    """Metric that the pruner compares."""

    def write(self, folder: Path) -> None:
        """Write the link to the folder of the job."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TRIAL, asdict(self))


def read_trial_link(folder: Path) -> TrialLink | None:
    """Read the trial link of a job folder; None if the job is not pruned."""
    values: dict[str, Any] = read_json(folder / TRIAL)
    return TrialLink(**values) if values else None


def open_storage(path: str) -> BaseStorage:
    """Open the storage in a file: SQLite by its suffix, else a journal, which works on NFS."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(SQLITE):
        return RDBStorage(f"sqlite:///{path}")
    return JournalStorage(JournalFileBackend(path))


def build_pruner(name: str, first_step: int) -> BasePruner:
    """Pruner by its name in ``PRUNERS``; ``first_step`` is the first step that can be pruned."""
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    return pruners.SuccessiveHalvingPruner(min_resource=first_step)
