"""Instantiation of the Lightning callbacks that a config names by ``_target_``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalewise.errors import ConfigError, ConfigIssue
from scalewise.run_config import RunConfig
from scalewise.training import import_class

if TYPE_CHECKING:
    from lightning.pytorch import Callback


def instantiate_callbacks(run: RunConfig) -> list[Callback]:
    """Build the callbacks of a run, in the order of its config.

    Raises:
        ConfigError: with all issues, as in ``check_callbacks``, and those of the constructors.
    """
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
    """Name, class and arguments of each callback of a run.

    The validation of the run has already checked that their packages are trusted.

    Raises:
        ConfigError: with an issue for each callback that cannot be imported, is not a Lightning
            callback, does not accept its arguments, or replaces the trained weights.
    """
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    specs: list[tuple[str, type[Callback], dict[str, Any]]] = []
    issues: list[ConfigIssue] = []
    for name, config in run.callbacks.items():
        key, path = f"callbacks.{name}", str(config["_target_"])
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        try:
            cls = import_class.import_class(f"{key}._target_", path, Callback, run.trusted_packages)
            import_class.check_arguments(key, cls, arguments)
            if issubclass(cls, WeightAveraging | StochasticWeightAveraging):
                reason = "replaces the trained weights by an average before the last checkpoint"
                raise ConfigError.for_key(f"{key}._target_", path, reason, "set 'callbacks=[ema]'")
        except ConfigError as error:
            issues += error.issues
            continue
        specs.append((name, cls, arguments))
    if issues:
        raise ConfigError(issues)
    return specs
