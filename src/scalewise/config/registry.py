"""The table of specs: ``@option("optimizer", "adamw")`` puts a frozen dataclass into a group.

Importing this module costs nothing (no Hydra, no torch), so that every spec may use it.
"""

import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from scalewise.config.renamed_targets import RENAMED_TARGETS

Spec = TypeVar("Spec", bound=type)
OPTIONS: dict[str, dict[str, type]] = {}

ENTRY_POINTS = "scalewise.options"
"""Entry points of packages that register options."""


def register_option(group: str, name: str) -> Callable[[Spec], Spec]:
    """Returns a class decorator that registers a spec as ``/schema/GROUP/NAME``.

    The files of ``conf/GROUP/`` stand on it by ``defaults: [/schema/GROUP/NAME@_here_]``.
    Raises ``ValueError`` where two classes ask for one name.
    """

    def register(cls: Spec) -> Spec:
        taken = OPTIONS.setdefault(group, {}).setdefault(name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{group}/{name} is {target_name(taken)} already, not {target_name(cls)}"
            )
        return cls

    return register


def option_name(config: object) -> str:
    """Name of the first option that the class of ``config`` registers, else the class's name."""
    for options in OPTIONS.values():
        for name, cls in options.items():
            if cls is type(config):
                return name
    return type(config).__name__


def target_name(cls: type) -> str:
    """Returns the ``_target_`` that names a spec."""
    return f"{cls.__module__}.{cls.__qualname__}"


def registered_targets() -> dict[str, type]:
    """Option classes by ``_target_``, their former paths included; closed groups take no other."""
    found = {target_name(cls): cls for specs in OPTIONS.values() for cls in specs.values()}
    return found | {old: found[new] for old, new in RENAMED_TARGETS.items() if new in found}


def import_options() -> None:
    """Imports every module that registers a spec, here and in ``scalewise.options`` entry points.

    A module is imported when its text says ``@register_option(``; modules that import torch
    do not say it.
    """
    for name in _config_modules():
        importlib.import_module(name)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _config_modules() -> Iterator[str]:
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        if path.name != "registry.py" and b"\n@register_option(" in path.read_bytes():
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
