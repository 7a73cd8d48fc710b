"""Private names of Optuna and submitit."""

from __future__ import annotations

from typing import Any

from scalewise.compat import PrivateNames

__all__ = ["study_id", "submit_command", "trial_id"]

optuna = PrivateNames("optuna")
submitit = PrivateNames("submitit")


@optuna.reads("_trial_id")
def trial_id(trial: Any) -> int:
    """Id of a trial in its storage; the public number is one within its study."""
    return int(trial._trial_id)


@optuna.reads("_study_id")
def study_id(study: Any) -> int:
    """Id of a study in its storage; the public API has its name only."""
    return int(study._study_id)


@submitit.reads("_submit_command")
def submit_command(executor: Any, command: str) -> Any:
    """Submit a shell command; the public method submits a pickled function."""
    return executor._submit_command(command)
