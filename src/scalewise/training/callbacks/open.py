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
            made = getattr(importlib.import_module(module), attribute)(**arguments)
        except (ImportError, AttributeError) as error:
            complaints.append(Complaint(f"{key}._target_", path, f"cannot be imported: {error}"))
        except Exception as error:
            complaints.append(Complaint(key, arguments, f"{path} refuses these: {error}"))
        else:
            if isinstance(made, Callback):
                callbacks.append(made)
            else:
                complaints.append(Complaint(key, path, "is no lightning.pytorch Callback"))
    if complaints:
        raise ConfigError(complaints)
    return callbacks
