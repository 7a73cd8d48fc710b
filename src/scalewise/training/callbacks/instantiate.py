"""The open group: Lightning callbacks that a config names by ``_target_``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.run_config import RunConfig
from scalewise.training import import_class

REPLACE_WEIGHTS = (WeightAveraging, StochasticWeightAveraging)
"""Lightning's callbacks after which a checkpoint no longer has the weights to train from."""


def instantiate_callbacks(run: RunConfig) -> list[Callback]:
    """Returns the run's callbacks in their order; raises ``ConfigError`` as ``checked`` does."""
    callbacks: list[Callback] = []
    issues: list[ConfigIssue] = []
    for name, cls, arguments in check_callbacks(run):
        try:
            callbacks.append(import_class.construct(f"callbacks.{name}", cls, arguments))
        except ConfigError as error:
            issues += error.issues
    if issues:
        raise ConfigError(issues)
    return callbacks


def check_callbacks(run: RunConfig) -> list[tuple[str, type[Callback], dict[str, Any]]]:
    """Returns each callback's name, class and arguments.

    Their packages were checked with the run. Raises ``ConfigError`` with every callback that is
    absent, lacks an argument of that name, is no Lightning callback or averages the weights in a
    way that a resumed run would train from.
    """
    found: list[tuple[str, type[Callback], dict[str, Any]]] = []
    issues: list[ConfigIssue] = []
    for name, config in run.callbacks.items():
        key, path = f"callbacks.{name}", str(config["_target_"])
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        try:
            cls = import_class.import_class(f"{key}._target_", path, Callback, run.trusted_packages)
            import_class.check_arguments(key, cls, arguments)
            if issubclass(cls, REPLACE_WEIGHTS):
                reason = "puts an average in the place of the weights before the last checkpoint"
                raise ConfigError.for_key(f"{key}._target_", path, reason, "set 'callbacks=[ema]'")
        except ConfigError as error:
            issues += error.issues
            continue
        found.append((name, cls, arguments))
    if issues:
        raise ConfigError(issues)
    return found
