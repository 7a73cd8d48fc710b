"""The open group: Lightning callbacks that a config names by ``_target_``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from lightning.pytorch import Callback

from scalewise.config.registry import target
from scalewise.errors import Complaint, ConfigError
from scalewise.run import Run


def instantiated(run: Run) -> list[Callback]:
    """Returns the run's callbacks in their order; raises ``ConfigError`` as ``checked`` does."""
    callbacks: list[Callback] = []
    complaints: list[Complaint] = []
    for name, cls, arguments in checked(run):
        try:
            callbacks.append(cls(**arguments))
        except Exception as error:  # whatever a foreign class says to its arguments
            complaints.append(_refused(name, cls, arguments, error))
    if complaints:
        raise ConfigError(complaints)
    return callbacks


def checked(run: Run) -> list[tuple[str, type[Callback], dict[str, Any]]]:
    """Returns each callback's name, class and arguments.

    Their packages were checked with the run. Raises ``ConfigError`` with every callback that is
    absent, lacks an argument of that name or is no Lightning callback.
    """
    found: list[tuple[str, type[Callback], dict[str, Any]]] = []
    complaints: list[Complaint] = []
    for name, config in run.callbacks.items():
        key, path = f"callbacks.{name}._target_", str(config["_target_"])
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        module, _, attribute = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever a foreign module does as it is imported
            complaints.append(Complaint(key, path, f"cannot be imported: {error}"))
            continue
        # Looked at before it is called: a trusted package has callables that run files.
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            complaints.append(Complaint(key, path, "is no lightning.pytorch Callback class"))
            continue
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            complaints.append(_refused(name, cls, arguments, error))
            continue
        found.append((name, cls, arguments))
    if complaints:
        raise ConfigError(complaints)
    return found


def _refused(name: str, cls: type, arguments: object, error: Exception) -> Complaint:
    return Complaint(f"callbacks.{name}", arguments, f"{target(cls)} refuses these: {error}")
