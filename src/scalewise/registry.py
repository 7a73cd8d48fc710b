"""Registry of config classes: ``@register_option("optimizer", "adamw")`` on a frozen dataclass.

This module imports neither Hydra nor torch, so that every config module may import it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from scalewise.cached_hash import cache_hash
from scalewise.renamed_targets import RENAMED_TARGETS

ConfigClass = TypeVar("ConfigClass", bound=type)
Config = TypeVar("Config")
OPTIONS: dict[str, dict[str, type]] = {}
"""Registered classes by group and name."""

ENTRY_POINTS = "scalewise.options"
"""Entry point group of packages that register options."""


def register_option(group: str, name: str) -> Callable[[ConfigClass], ConfigClass]:
    """Class decorator that registers a config class as ``/schema/GROUP/NAME``.

    Files of ``conf/GROUP/`` extend it with ``defaults: [/schema/GROUP/NAME@_here_]``.
    Its instances compute their hash once. Raises ``ValueError`` if the name is already taken by
    another class.
    """

    def register(cls: ConfigClass) -> ConfigClass:
        registered = OPTIONS.setdefault(group, {}).setdefault(name, cls)
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{group}/{name}: {target_name(cls)} conflicts with {target_name(registered)}"
            )
        return cache_hash(cls)

    return register


def option_name(config: object) -> str:
    """Name of the first option registered for the class of ``config``, else the class name."""
    for options in OPTIONS.values():
        for name, cls in options.items():
            if cls is type(config):
                return name
    return type(config).__name__


def target_name(cls: type) -> str:
    """Import path of a config class, its ``_target_``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def with_fields(config: Config, **values: object) -> Config:
    """Config of an abstract type, such as ``DataConfig``, with changed fields."""
    return replace(config, **values)  # type: ignore[type-var]  # every subclass is a dataclass


def plain_value(value: object) -> object:
    """Convert options to nested dicts with their ``_target_``, and other values to plain ones."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"_target_": target_name(type(value)), **_plain_fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {
            str(key): _plain_fields(entry) if is_dataclass(entry) else plain_value(entry)
            for key, entry in value.items()
        }
    if isinstance(value, tuple | list):
        return [plain_value(entry) for entry in value]
    return value


def _plain_fields(value: Any) -> dict[str, object]:
    return {entry.name: plain_value(getattr(value, entry.name)) for entry in fields(value)}


def registered_targets() -> dict[str, type]:
    """Registered classes by ``_target_``, former paths included."""
    targets = {target_name(cls): cls for classes in OPTIONS.values() for cls in classes.values()}
    return targets | {old: targets[new] for old, new in RENAMED_TARGETS.items() if new in targets}


def import_options() -> None:
    """Import every module that registers options, in scalewise and in its entry points.

    A module of scalewise is imported if its text contains ``@register_option(``; such modules do
    not import torch.
    """
    for name in _config_modules():
        importlib.import_module(name)
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def _config_modules() -> Iterator[str]:
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name != "registry.py" and b"\n@register_option(" in path.read_bytes():
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
