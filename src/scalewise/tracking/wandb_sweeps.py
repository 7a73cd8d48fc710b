"""A search as W&B Sweeps takes it: the same axes, driven by ``wandb agent``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.config import DEFAULT_TRIALS, SearchConfig
from scalewise.hpo.space import Axis, ChoiceAxis, grid_points

METHODS = {"tpe": "bayes", "nsga2": "bayes", "random": "random", "grid": "grid"}
"""Which method of W&B comes nearest to each sampler."""

UNDERSTOOD = ("_target_", "_convert_", "_recursive_", "params", "max_batch_size")
"""Options of a grid that W&B has too, or that are for the launcher alone."""


def wandb_sweep_config(
    search: SearchConfig,
    space: Sequence[Axis],
    fixed: Sequence[str],
    name: str,
    question: str,
) -> dict[str, Any]:
    """Returns the configuration of a W&B sweep; ``fixed`` are the overrides of every job.

    Raises ``ConfigError`` for what W&B cannot search. The metric is the figure that stays of a
    run, ``final/...``: the value of the others at W&B is that of the last window.
    """
    issues = list(search.validate(space))
    method = METHODS.get(search.sampler, "")
    if method == "bayes" and len(search.objectives) > 1:
        fix = "name one objective, or set hydra.sweeper.sampler=random"
        asked = dict(search.objectives)
        reason = "W&B searches by one metric"
        issues.append(ConfigIssue("hydra.sweeper.objectives", asked, reason, fix))
    if issues:
        raise ConfigError(issues)
    metric, goal = next(iter(search.objectives.items()))
    capped = {} if method == "grid" and search.trials is None else {"run_cap": search.trials}
    if method != "grid":
        capped = {"run_cap": search.trials or DEFAULT_TRIALS}
    return {
        "name": name,
        **({"description": question} if question else {}),
        "program": "scalewise",
        "method": method,
        "metric": {"name": f"final/{metric}", "goal": goal},
        "parameters": {axis.key: _sweep_parameter(axis, method) for axis in space},
        **capped,
        "command": [
            *("${env}", "${interpreter}", "-P", "-m", "${program}", "train"),
            *(*fixed, "${args_no_hyphens}"),
        ],
    }


def unsupported_settings(search: SearchConfig) -> list[str]:
    """Returns what a W&B sweep has no place for."""
    said = []
    if search.constraints:
        said.append(f"constraints {dict(search.constraints)}: W&B Sweeps knows none")
    if search.pruner != "none":
        said.append(f"pruner {search.pruner}: runs of a W&B sweep go to their end")
    if len(search.objectives) > 1:
        said.append(f"objectives beside the first: {', '.join(list(search.objectives)[1:])}")
    return said


def sweeper_search(sweeper: Mapping[str, Any], option: str) -> SearchConfig:
    """Returns the search that ``hydra.sweeper`` asks for, a grid where it is the suite's own.

    Raises ``ConfigError``, which names the ``option``, for a way through the axes that W&B has not.
    """
    if str(sweeper["_target_"]).endswith(".OptunaSweeper"):
        return SearchConfig.from_options(sweeper)
    strange = [key for key, value in sweeper.items() if value and key not in UNDERSTOOD]
    if strange:
        reason = f"W&B Sweeps cannot walk the axes by {', '.join(strange)}"
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
    whole: dict[str, Any] = {"q": 1} if kind.startswith("q_") else {}
    return {"distribution": kind, "min": axis.low, "max": axis.high, **whole}


def _as_number(text: str) -> str | int | float:
    """Returns a value as a number where it is one, so that W&B draws it as such."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flat_keys() -> set[str]:
    """Returns the keys that a ``wandb agent`` puts into the config of the run it starts."""
    import yaml

    from scalewise import bounded_yaml

    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if path is None:
        return set()
    try:
        with open(path, encoding="utf-8") as file:
            return set(bounded_yaml.load_yaml(file.read()))
    except (OSError, TypeError, yaml.YAMLError):
        return set()
