"""Classes that a config names by their path, of packages that the user trusts."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import TypeVar

from scalewise.config.registry import target
from scalewise.errors import Complaint, ConfigError

Named = TypeVar("Named")


def named(key: str, path: str, kind: type[Named]) -> type[Named]:
    """Returns the class at ``package.module.Class``, looked for in the current folder as well.

    The package was checked with the run. Raises ``ConfigError`` for a path that leads to nothing,
    or to what is no subclass of ``kind``.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # behind what is installed, which nothing here may hide
    module, _, attribute = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a foreign module does as it is imported
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError.one(key, path, f"cannot be imported: {said}") from error
    # Looked at before it is called: a trusted package has callables that run files.
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        package = kind.__module__.partition(".")[0]
        raise ConfigError.one(key, path, f"is no {package}.pytorch {kind.__name__} class")
    return cls


def bound(key: str, cls: type, arguments: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` for arguments that a class does not take, or lacks."""
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError([refused(key, cls, arguments, error)]) from error


def made(key: str, cls: type[Named], arguments: Mapping[str, object]) -> Named:
    """Returns an object of a class; raises ``ConfigError`` with what its constructor raised."""
    try:
        return cls(**arguments)
    except Exception as error:  # whatever a foreign class says to its arguments
        raise ConfigError([refused(key, cls, arguments, error)]) from error


def refused(key: str, cls: type, arguments: object, error: Exception) -> Complaint:
    """Returns the complaint about arguments at which a class raised an error."""
    said = " ".join(str(error).split()) or type(error).__name__
    return Complaint(key, arguments, f"{target(cls)} refuses these: {said}")
