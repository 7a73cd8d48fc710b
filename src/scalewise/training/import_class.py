"""Classes that a config names by their path, of packages that the user trusts."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TypeVar

from scalewise.config.registry import target_name
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.failures import exception_message, user_frame
from scalewise.typed_override import format_override
from scalewise.validation.trusted_imports import TRUSTED_PACKAGES

Named = TypeVar("Named")


@dataclass(frozen=True)
class TrustedFinder:
    """Imports named top-level modules from one folder, and no other module that lies in it."""

    folder: str
    names: frozenset[str]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a trusted top-level module; submodules are found by their parent."""
        if path is not None or name not in self.names:
            return None
        return PathFinder.find_spec(name, [self.folder], target)


def _import_from_current_folder(trusted_modules: Collection[str]) -> None:
    """Lets this process import the ``trusted_modules`` modules of the current folder.

    Last on ``sys.meta_path``: nothing in the folder shadows an installed module.
    """
    finder = TrustedFinder(os.getcwd(), frozenset(trusted_modules))
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)


def _trust_fix(error: ModuleNotFoundError, trusted: Collection[str]) -> str:
    """Returns how a module of the current folder that is not trusted becomes importable."""
    name = (error.name or "").partition(".")[0]
    if name in trusted or PathFinder.find_spec(name, [os.getcwd()]) is None:
        return ""
    return f"if you trust it, set {format_override('trusted_packages', [*trusted, name])}"


def import_class(
    key: str, path: str, kind: type[Named], trusted_packages: Sequence[str] = ()
) -> type[Named]:
    """Returns the class at ``package.module.Class``; its package was checked with the run.

    ``trusted_packages``: those that the user names; they may lie in the current folder.
    Raises ``ConfigError`` for a path that leads to nothing, to what is no subclass of ``kind``, or
    to a class that another package defines which is not trusted.
    """
    _import_from_current_folder(trusted_packages)
    module, _, attribute = path.rpartition(".")
    if "__main__" in module.split("."):  # importing one runs a program
        raise ConfigError.for_key(key, path, "is a program, not a module of classes")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a foreign module does as it is imported
        said = _error_reason(error)
        fix = _trust_fix(error, trusted_packages) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError.for_key(key, path, f"cannot be imported: {said}", fix) from error
    # Looked at before it is called: a trusted package has callables that run files.
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        package = kind.__module__.partition(".")[0]
        raise ConfigError.for_key(key, path, f"is no {package}.pytorch {kind.__name__} class")
    defined_in = cls.__module__.partition(".")[0]
    if defined_in not in (*TRUSTED_PACKAGES, *trusted_packages):
        reason = f"is defined in the package {defined_in!r}, which is not trusted"
        trusted = format_override("trusted_packages", [*trusted_packages, defined_in])
        fix = f"if you trust it, set {trusted}"
        raise ConfigError.for_key(key, path, reason, fix)
    return cls


def check_arguments(key: str, cls: type, arguments: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` for arguments that a class does not take, or lacks."""
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError([argument_issue(key, cls, arguments, error)]) from error


def construct(key: str, cls: type[Named], arguments: Mapping[str, object]) -> Named:
    """Returns an object of a class; raises ``ConfigError`` with what its constructor raised."""
    try:
        return cls(**arguments)
    except Exception as error:  # whatever a foreign class says to its arguments
        raise ConfigError([argument_issue(key, cls, arguments, error)]) from error


def argument_issue(key: str, cls: type, arguments: object, error: Exception) -> ConfigIssue:
    """Returns the complaint about arguments at which a class raised an error."""
    return ConfigIssue(key, arguments, f"{target_name(cls)} refuses these: {_error_reason(error)}")


def _error_reason(error: Exception) -> str:
    """Returns the message of an exception and the place in the user's code that raised it."""
    place = user_frame(error)
    return f"{exception_message(error)} ({place})" if place else exception_message(error)
