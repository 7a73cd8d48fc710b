"""The table of specs: ``@option("optimizer", "adamw")`` puts a frozen dataclass into a group.

Importing this module costs nothing (no Hydra, no torch), so that every spec may use it.
"""

import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

Spec = TypeVar("Spec", bound=type)
OPTIONS: dict[str, dict[str, type]] = {}

ENTRY_POINTS = "scalewise.options"
"""Entry points of packages that register options."""


def option(group: str, name: str) -> Callable[[Spec], Spec]:
    """Returns a class decorator that registers a spec as ``/schema/GROUP/NAME``.

    The files of ``conf/GROUP/`` stand on it by ``defaults: [/schema/GROUP/NAME@_here_]``.
    Raises ``ValueError`` where two classes ask for one name.
    """

    def register(cls: Spec) -> Spec:
        taken = OPTIONS.setdefault(group, {}).setdefault(name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{group}/{name} is {target(taken)} already, not {target(cls)}")
        return cls

    return register


def target(cls: type) -> str:
    """Returns the ``_target_`` that names a spec."""
    return f"{cls.__module__}.{cls.__qualname__}"


def targets() -> dict[str, type]:
    """Returns every registered spec by its ``_target_``: the only ones a closed group accepts."""
    return {target(cls): cls for specs in OPTIONS.values() for cls in specs.values()}


def discover() -> None:
    """Imports every module that registers a spec, here and in ``scalewise.options`` entry points.

    A module is imported when its text says ``@option(``: live modules, which import torch at
    their head, stay out.
    """
    for name in _spec_modules():
        importlib.import_module(name)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _spec_modules() -> Iterator[str]:
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        if path.name != "registry.py" and b"\n@option(" in path.read_bytes():
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
