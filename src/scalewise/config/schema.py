"""Schema twins: what Hydra checks overrides against, derived from the specs.

A frozen dataclass would become a read-only config and a structured node refuses ``_target_``, so
each spec gets a writable twin with ``_target_`` as its first field.
"""

import dataclasses
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore

from scalewise.config import registry, tree
from scalewise.run import Run


@cache
def store() -> None:
    """Puts the twins into Hydra's ConfigStore, once."""
    registry.discover()
    configs = ConfigStore.instance()
    for group, specs in registry.OPTIONS.items():
        for name, cls in specs.items():
            configs.store(group=f"schema/{group}", name=name, node=twin(cls), provider="scalewise")
    configs.store(group="schema", name="run", node=_run_twin(), provider="scalewise")


def twin(cls: type) -> type:
    """Returns the writable dataclass that mirrors a spec's fields."""
    hints = typing.get_type_hints(cls)
    entries: list[tuple[str, Any, Any]] = [
        ("_target_", str, dataclasses.field(default=registry.target(cls)))
    ]
    entries += [
        (entry.name, _open_type(hints[entry.name]), _writable(entry))
        for entry in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(cls.__name__, entries)


def _run_twin() -> type:
    hints = typing.get_type_hints(Run)
    entries: list[tuple[str, Any, Any]] = []
    for entry in dataclasses.fields(Run):
        if entry.name in tree.CLOSED:
            entries.append((entry.name, Any, dataclasses.field(default=None)))
        elif entry.name not in ("choices", "overrides", "callbacks"):
            entries.append((entry.name, _open_type(hints[entry.name]), _writable(entry)))
    callbacks: Any = dataclasses.field(default_factory=dict)
    return dataclasses.make_dataclass("Run", [*entries, ("callbacks", dict[str, Any], callbacks)])


def _open_type(hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]  # made at run time
    if typing.get_origin(hint) is Mapping:
        return dict[typing.get_args(hint)]  # type: ignore[misc]  # made at run time
    return hint


def _writable(entry: "dataclasses.Field[Any]") -> Any:
    if entry.default is not dataclasses.MISSING:
        if isinstance(entry.default, tuple):
            held = list(entry.default)
            return dataclasses.field(default_factory=lambda: list(held))
        return dataclasses.field(default=entry.default)
    if entry.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=entry.default_factory)
    return dataclasses.field(default="???")
