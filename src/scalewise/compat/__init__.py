"""Every use of a private name of a library, one module per library.

A name is private if it or its module starts with an underscore, or if scalewise replaces it. Its
docstring names the public API that is missing. ``tests/unit/compat`` fails if a library
changes a name, its signature or its behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from importlib import import_module, metadata
from inspect import getattr_static
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from scalewise.errors import ScalewiseError

P = ParamSpec("P")
R = TypeVar("R")


class IncompatibleLibraryError(ScalewiseError):
    """Installed library without a private name that scalewise uses."""


class PrivateNames:
    """Guard of the private names of one library.

    As a context manager it wraps imports of them. A name that is missing raises
    :class:`IncompatibleLibraryError` when it is used, not when the module is imported::

        private = PrivateNames("torch")

        with private:
            from torch.optim._muon import _adjust_lr as adjust_lr

        if not TYPE_CHECKING:
            __getattr__ = private.missing_name

    Args:
        distribution: Name of the library on the package index.
    """

    def __init__(self, distribution: str) -> None:
        self._distribution = distribution
        self._reasons: list[str] = []

    def __enter__(self) -> None:
        """Begin a block of imports."""

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> bool:
        """Record a missing name; other exceptions propagate."""
        if isinstance(error, ImportError | AttributeError):
            self._reasons.append(str(error))
            return True
        return False

    def missing_name(self, name: str) -> Any:
        """``__getattr__`` of the module: raise the error of the imports that failed."""
        if self._reasons and not name.startswith("__"):
            raise self._error("; ".join(self._reasons))
        raise AttributeError(name)

    def reads(self, *names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator of a function that reads the attributes ``names`` of library objects."""

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
                try:
                    return function(*args, **kwargs)
                except AttributeError as error:
                    if error.name not in names:
                        raise
                    raise self._error(str(error)) from error

            return guarded

        return decorate

    def get(self, path: str) -> Any:
        """Object at a path ``package.module:Class.attribute``."""
        owner, name = self._owner(path)
        return getattr(owner, name)

    @contextmanager
    def replaced(self, path: str, value: object) -> Iterator[None]:
        """Context in which ``value`` is at the path ``package.module:Class.attribute``."""
        original = self.replace(path, value)
        try:
            yield
        finally:
            self.replace(path, original)

    def replace(self, path: str, value: object) -> object:
        """Set the object at the path ``package.module:Class.attribute`` and return the old one."""
        owner, name = self._owner(path)
        original: object = getattr_static(owner, name)
        setattr(owner, name, value)
        return original

    def replace_attribute(self, owner: object, name: str, value: object) -> None:
        """Set the attribute ``name`` of a library object."""
        try:
            getattr_static(owner, name)
        except AttributeError:
            raise self._error(f"{type(owner).__name__} has no {name}") from None
        setattr(owner, name, value)

    def _owner(self, path: str) -> tuple[Any, str]:
        """Module or class that contains a path, and the last name of the path."""
        module, _, qualified_name = path.partition(":")
        *owners, name = qualified_name.split(".")
        try:
            owner = reduce(getattr, owners, import_module(module))
            getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise self._error(f"{path} does not exist") from error
        return owner, name

    def _error(self, reason: str) -> IncompatibleLibraryError:
        version = metadata.version(self._distribution)
        return IncompatibleLibraryError(
            f"{self._distribution} {version} is not supported: {reason}; "
            f"install {supported_range(self._distribution)}"
        )


def supported_range(distribution: str) -> str:
    """Requirement of scalewise on a library, such as ``torch<2.14,>=2.11``."""
    requirements = metadata.requires("scalewise") or []
    return next(
        requirement.partition(";")[0].strip()
        for requirement in requirements
        if re.split(r"[^\w.-]", requirement)[0] == distribution
    )
