"""The open group: Lightning callbacks that a config names by ``_target_``."""

from __future__ import annotations

import importlib

from lightning.pytorch import Callback

from scalewise.errors import Complaint, ConfigError
from scalewise.run import Run


def instantiated(run: Run) -> list[Callback]:
    """Returns the run's callbacks in their order.

    Their packages were checked with the run. Raises ``ConfigError`` with every callback that is
    absent, refuses its arguments or is no Lightning callback.
    """
    callbacks: list[Callback] = []
    complaints: list[Complaint] = []
    for name, config in run.callbacks.items():
        key, path = f"callbacks.{name}", str(config["_target_"])
        arguments = {key: value for key, value in config.items() if key != "_target_"}
        module, _, attribute = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            complaints.append(Complaint(f"{key}._target_", path, f"cannot be imported: {error}"))
            continue
        # Looked at before it is called: a trusted package has callables that run files.
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            reason = "is no lightning.pytorch Callback class"
            complaints.append(Complaint(f"{key}._target_", path, reason))
            continue
        try:
            callbacks.append(cls(**arguments))
        except Exception as error:
            complaints.append(Complaint(key, arguments, f"{path} refuses these: {error}"))
    if complaints:
        raise ConfigError(complaints)
    return callbacks
