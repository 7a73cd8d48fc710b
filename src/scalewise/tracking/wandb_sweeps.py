"""Conversion of a hyperparameter search to a W&B sweep, driven by ``wandb agent``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from scalewise import bounded_yaml
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.config import DEFAULT_TRIALS, SearchConfig
from scalewise.hpo.space import Axis, ChoiceAxis, grid_points

METHODS = {"tpe": "bayes", "nsga2": "bayes", "random": "random", "grid": "grid"}
"""Closest W&B method by sampler."""

GRID_OPTIONS = ("_target_", "_convert_", "_recursive_", "params", "max_batch_size")
"""Options of a grid sweeper that W&B supports or that concern the launcher only."""


def wandb_sweep_config(
    search: SearchConfig,
    space: Sequence[Axis],
    fixed: Sequence[str],
    name: str,
    question: str,
) -> dict[str, Any]:
    """Build the config of a W&B sweep.

    The metric is ``final/...`` of the run summary, because other keys have the value of the last
    window only. Raises ``ConfigError`` for a search that W&B does not support.

    Args:
        search: Settings of the search.
        space: Search space.
        fixed: Overrides of every job.
        name: Name of the sweep.
        question: Description of the sweep.
    """
    issues = list(search.validate(space))
    method = METHODS.get(search.sampler, "")
    if method == "bayes" and len(search.objectives) > 1:
        fix = "set one objective, or set hydra.sweeper.sampler=random"
        objectives = dict(search.objectives)
        reason = "Bayesian search of W&B supports one metric"
        issues.append(ConfigIssue("hydra.sweeper.objectives", objectives, reason, fix))
    if issues:
        raise ConfigError(issues)
    metric, goal = next(iter(search.objectives.items()))
    run_cap = {} if method == "grid" and search.trials is None else {"run_cap": search.trials}
    if method != "grid":
        run_cap = {"run_cap": search.trials or DEFAULT_TRIALS}
    return {
        "name": name,
        **({"description": question} if question else {}),
        "program": "scalewise",
        "method": method,
        "metric": {"name": f"final/{metric}", "goal": goal},
        "parameters": {axis.key: _sweep_parameter(axis, method) for axis in space},
        **run_cap,
        "command": [
            *("${env}", "${interpreter}", "-P", "-m", "${program}", "train"),
            *(*fixed, "${args_no_hyphens}"),
        ],
    }


def unsupported_settings(search: SearchConfig) -> list[str]:
    """Describe the settings of the search that a W&B sweep does not support."""
    messages = []
    if search.constraints:
        messages.append(f"constraints {dict(search.constraints)}: not supported by W&B Sweeps")
    if search.pruner != "none":
        messages.append(f"pruner {search.pruner}: runs of a W&B sweep are not pruned")
    if len(search.objectives) > 1:
        messages.append(f"further objectives: {', '.join(list(search.objectives)[1:])}")
    return messages


def sweeper_search(sweeper: Mapping[str, Any], option: str) -> SearchConfig:
    """Search of ``hydra.sweeper``: that of the Optuna sweeper, or a grid for scalewise's sweeper.

    Raises ``ConfigError`` naming ``option`` for a sweeper setting that W&B does not support.
    """
    if str(sweeper["_target_"]).endswith(".OptunaSweeper"):
        return SearchConfig.from_options(sweeper)
    unsupported = [key for key, value in sweeper.items() if value and key not in GRID_OPTIONS]
    if unsupported:
        reason = f"W&B Sweeps does not support {', '.join(unsupported)}"
        raise ConfigError.for_key("hydra/sweeper", option, reason, "use scalewise train")
    return SearchConfig(sampler="grid")


def _sweep_parameter(axis: Axis, method: str) -> dict[str, Any]:
    if isinstance(axis, ChoiceAxis):
        return {"values": [_as_number(value) for value in axis.values]}
    if axis.step is not None:
        return {"values": [point[axis.key] for point in grid_points([axis])]}
    kind = "int_uniform" if axis.is_integer else "uniform"
    if axis.log:
        kind = "q_log_uniform_values" if axis.is_integer else "log_uniform_values"
    step: dict[str, Any] = {"q": 1} if kind.startswith("q_") else {}
    return {"distribution": kind, "min": axis.low, "max": axis.high, **step}


def _as_number(text: str) -> str | int | float:
    """Convert to a number if possible, so that W&B plots it as one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flat_keys() -> set[str]:
    """Keys that ``wandb agent`` writes to the config of the run that it starts."""
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if path is None:
        return set()
    try:
        with open(path, encoding="utf-8") as file:
            return set(bounded_yaml.load_yaml(file.read()))
    except (OSError, TypeError, yaml.YAMLError):
        return set()
