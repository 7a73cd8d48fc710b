"""Record of a hyperparameter search: ``study.json``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from scalewise.hpo.optuna_study import FOLDER, REASON, STATUS, OptunaSearch
from scalewise.hpo.space import round_point
from scalewise.run_files import write_json

FILE = "study.json"
MIN_TRIALS_FOR_IMPORTANCE = 4
"""Minimum number of complete trials for an estimate of importance."""


def write_record(optuna_search: OptunaSearch, sweep: Path) -> None:
    """Write the record to the folder of the sweep."""
    write_json(sweep / FILE, build_record(optuna_search, sweep))


def build_record(optuna_search: OptunaSearch, sweep: Path) -> dict[str, object]:
    """Record of the search: options, trials, best trials and importance.

    ``best`` lists the numbers of the Pareto-optimal trials that satisfy the constraints.
    ``importance`` is by objective and axis, and sums to 1 (PED-ANOVA; Watanabe, Bansal and Hutter,
    IJCAI 2023).
    """
    search = optuna_search.config
    return {
        "study": optuna_search.study.study_name,
        "storage": optuna_search.storage_file,
        "sampler": search.sampler,
        "pruner": search.pruner,
        "objectives": dict(search.objectives),
        "constraints": dict(search.constraints),
        "wanted": optuna_search.num_trials,
        "best": [trial.number for trial in pareto_trials(optuna_search)],
        "importance": axis_importance(optuna_search),
        "trials": list(_trial_records(optuna_search, sweep)),
    }


def pareto_trials(optuna_search: OptunaSearch) -> list[FrozenTrial]:
    """Pareto-optimal trials by the first objective; the best trial only for one objective.

    Trials that violate a constraint are excluded.
    """
    goal = next(iter(optuna_search.config.objectives.values()))
    sign = 1 if goal == "minimize" else -1
    front = sorted(optuna_search.study.best_trials, key=lambda trial: sign * trial.values[0])
    return front if len(optuna_search.config.objectives) > 1 else front[:1]


def axis_importance(optuna_search: OptunaSearch) -> dict[str, dict[str, float]]:
    """Importance of each axis by objective; empty with too few complete trials."""
    complete_trials = optuna_search.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(complete_trials) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    importance = {}
    for index, (key, goal) in enumerate(optuna_search.config.objectives.items()):
        sign = 1 if goal == "minimize" else -1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. of axes without a numeric importance
            try:
                importance[key] = optuna.importance.get_param_importances(
                    optuna_search.study,
                    evaluator=PedAnovaImportanceEvaluator(),
                    target=partial(_signed_value, index, sign),
                )
            except (RuntimeError, ValueError):  # all values are equal
                continue
    return importance


def _signed_value(index: int, sign: int, trial: FrozenTrial) -> float:
    return sign * float(trial.values[index])


def _trial_records(optuna_search: OptunaSearch, sweep: Path) -> Iterator[dict[str, object]]:
    for trial in optuna_search.study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        folder = attributes.get(FOLDER)
        if folder is not None and Path(folder).is_relative_to(sweep):
            folder = str(Path(folder).relative_to(sweep))
        yield {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "status": attributes.get(STATUS, ""),
            "reason": attributes.get(REASON, ""),
            "params": round_point(trial.params),
            "values": trial.values,
            "over": {key: value for key, value in trial.constraints.items() if value > 0},
            "reported": {str(step): v for step, v in trial.intermediate_values.items()},
            "folder": folder,
        }
