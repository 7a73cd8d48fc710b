"""Where a study is kept, and what a job is told of the trial that it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.tracking.run_files import read_json, write_json

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

SQLITE = (".db", ".sqlite", ".sqlite3")
TRIAL = "trial.json"


@dataclass(frozen=True)
class TrialLink:
    """What a job needs to report on its trial while it runs."""

    storage: str
    study: str
    trial: int
    pruner: str
    metric: str

    def write(self, folder: Path) -> None:
        """Leaves it in the folder that the job is to have."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TRIAL, asdict(self))


def read_trial_link(folder: Path) -> TrialLink | None:
    """Returns what a job's folder says of its trial; None where it is none that may be pruned."""
    found: dict[str, Any] = read_json(folder / TRIAL)
    return TrialLink(**found) if found else None


def open_storage(path: str) -> BaseStorage:
    """Returns the storage in a file: sqlite by its suffix, else a journal, which NFS can hold."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(SQLITE):
        return RDBStorage(f"sqlite:///{path}")
    return JournalStorage(JournalFileBackend(path))


def build_pruner(name: str, first_step: int) -> BasePruner:
    """Returns one of ``PRUNERS``; ``first_step`` is the step at which a trial is first judged."""
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    return pruners.SuccessiveHalvingPruner(min_resource=first_step)
