"""Import and instantiation of the classes that a config names: callbacks, modules, data."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from scalewise.data.user_datamodule import UserDataModule
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.failures import exception_message, user_frame
from scalewise.objectives import UserModule
from scalewise.registry import target_name
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override
from scalewise.validation.trusted_imports import TRUSTED_PACKAGES

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule

ClassT = TypeVar("ClassT")
UserClasses: TypeAlias = "tuple[type[LightningModule], type[LightningDataModule] | None]"
"""Classes of the module and of the data; None: the module has its own data loaders."""


@dataclass(frozen=True)
class TrustedFinder:
    """Meta path finder that imports only the named top-level modules of a folder."""

    folder: str
    """Folder of the modules."""
    names: frozenset[str]
    """Top-level modules that may be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a trusted top-level module; Python finds submodules by their parent package."""
        if path is not None or name not in self.names:
            return None
        return PathFinder.find_spec(name, [self.folder], target)


def _import_from_current_folder(trusted_modules: Collection[str]) -> None:
    """Make the trusted modules of the current folder importable.

    The finder is last on ``sys.meta_path``, so that the folder shadows no installed module.
    """
    finder = TrustedFinder(os.getcwd(), frozenset(trusted_modules))
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)


def _trust_fix(error: ModuleNotFoundError, trusted: Collection[str]) -> str:
    """Fix for an import error of an untrusted module in the current folder; empty: other error."""
    name = (error.name or "").partition(".")[0]
    if name in trusted or PathFinder.find_spec(name, [os.getcwd()]) is None:
        return ""
    return f"if you trust it, set {format_override('trusted_packages', [*trusted, name])}"


def import_class(
    key: str, path: str, kind: type[ClassT], trusted_packages: Sequence[str] = ()
) -> type[ClassT]:
    """Import a class.

    The validation of the run has already checked that the package of ``path`` is trusted.

    Args:
        key: Config key of the path, for errors.
        path: Import path, as ``package.module.Class``.
        kind: Required base class.
        trusted_packages: Packages that the user trusts, installed or in the current folder.

    Raises:
        ConfigError: the path cannot be imported, is not a subclass of ``kind``, or is defined in
            an untrusted package.
    """
    _import_from_current_folder(trusted_packages)
    module, _, attribute = path.rpartition(".")
    if "__main__" in module.split("."):  # the import would run a program
        raise ConfigError.for_key(key, path, "names a __main__ module, which is a program")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import can raise anything
        reason = f"cannot be imported: {_error_reason(error)}"
        fix = _trust_fix(error, trusted_packages) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError.for_key(key, path, reason, fix) from error
    # Checked before any call: trusted packages contain functions that run files.
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        package = kind.__module__.partition(".")[0]
        raise ConfigError.for_key(
            key, path, f"is not a subclass of {package}.pytorch.{kind.__name__}"
        )
    defined_in = cls.__module__.partition(".")[0]
    if defined_in not in (*TRUSTED_PACKAGES, *trusted_packages):
        reason = f"is defined in package {defined_in!r}, which is not trusted"
        trusted = format_override("trusted_packages", [*trusted_packages, defined_in])
        fix = f"if you trust it, set {trusted}"
        raise ConfigError.for_key(key, path, reason, fix)
    return cls


def import_user_classes(run: RunConfig) -> UserClasses:
    """Import the module class and the data class of a run.

    Raises:
        ConfigError: with all issues of both classes and their arguments.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    objective, data, issues = run.objective, run.data, list[ConfigIssue]()
    assert isinstance(objective, UserModule)
    assert isinstance(data, UserDataModule)
    classes: dict[str, Any] = {"data": None}
    for group, spec, kind in (
        ("objective", objective, LightningModule),
        ("data", data, LightningDataModule),
    ):
        if not spec.target:
            continue
        try:
            classes[group] = import_class(
                f"{group}.target", spec.target, kind, run.trusted_packages
            )
            check_arguments(f"{group}.arguments", classes[group], spec.arguments)
        except ConfigError as error:
            issues += error.issues
    module = classes.get("objective")
    if not data.target and module and module.train_dataloader is LightningModule.train_dataloader:
        reason = "is empty, and the module does not define train_dataloader"
        issues.append(ConfigIssue("data.target", "''", reason, "set data.target=mypkg.MyData"))
    if issues:
        raise ConfigError(issues)
    return classes["objective"], classes["data"]


def check_arguments(key: str, cls: type, arguments: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` if arguments do not match the signature of a class."""
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError([argument_issue(key, cls, arguments, error)]) from error


def construct(key: str, cls: type[ClassT], arguments: Mapping[str, object]) -> ClassT:
    """Construct an object; raise ``ConfigError`` if the constructor fails."""
    try:
        return cls(**arguments)
    except Exception as error:  # a constructor can raise anything
        raise ConfigError([argument_issue(key, cls, arguments, error)]) from error


def argument_issue(key: str, cls: type, arguments: object, error: Exception) -> ConfigIssue:
    """Config issue of arguments for which a class has raised an error."""
    return ConfigIssue(key, arguments, f"{target_name(cls)} rejects these: {_error_reason(error)}")


def _error_reason(error: Exception) -> str:
    """Message of an exception and the line of user code that has raised it."""
    frame = user_frame(error)
    return f"{exception_message(error)} ({frame})" if frame else exception_message(error)


def instantiate_callbacks(run: RunConfig) -> list[Callback]:
    """Build the callbacks of a run, in the order of its config.

    Raises:
        ConfigError: with all issues, as in ``check_callbacks``, and those of the constructors.
    """
    callbacks: list[Callback] = []
    issues: list[ConfigIssue] = []
    for name, cls, arguments in check_callbacks(run):
        try:
            callbacks.append(construct(f"callbacks.{name}", cls, arguments))
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
            cls = import_class(f"{key}._target_", path, Callback, run.trusted_packages)
            check_arguments(key, cls, arguments)
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
