"""Schemas that Hydra checks overrides against, derived from the registered config classes.

OmegaConf makes a frozen dataclass read-only, and a structured node rejects ``_target_``. Therefore
each config class gets a writable mirror class with ``_target_`` as its first field.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Any, Self

from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from scalewise import registry
from scalewise.config import paths
from scalewise.config.launchers import LAUNCHERS
from scalewise.run_config import RunConfig


@cache
def store_schemas() -> None:
    """Store the schemas and the launcher options in Hydra's ConfigStore, once."""
    Plugins.instance()  # loads plugins first: our launchers replace others of a name
    registry.import_options()
    configs = ConfigStore.instance()
    configs.store(group="schema", name="run", node=_run_schema_mirror(), provider="scalewise")
    schemas, launchers = configs.repo["schema"], configs.repo["hydra"]["launcher"]
    for group, classes in registry.OPTIONS.items():
        for name, cls in classes.items():
            node = DeferredNode(f"schema/{group}", f"{name}.yaml", partial(schema_mirror, cls))
            schemas.setdefault(group, {})[node.name] = node
    for name, options in LAUNCHERS.items():
        node = DeferredNode("hydra/launcher", f"{name}.yaml", options)
        launchers[node.name] = node
    configs.repo = _SharedSchemas(configs.repo)


class _SharedSchemas(dict[str, Any]):
    """Read-only store; Hydra copies the whole store in each composition."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


class DeferredNode(ConfigNode):
    """Node of the ConfigStore that is built on first use, because few options are used."""

    def __init__(self, group: str, name: str, factory: Callable[[], object]) -> None:
        self.group, self.name, self.package, self.provider = group, name, None, "scalewise"
        self.factory = factory

    @cached_property
    def node(self) -> DictConfig:  # type: ignore[override]  # Hydra's is an attribute
        """Structured config that Hydra loads and copies."""
        config: DictConfig = OmegaConf.structured(self.factory())
        return config

    def __copy__(self) -> ConfigNode:
        return ConfigNode(self.name, self.node, self.group, self.package, self.provider)


def schema_mirror(cls: type) -> type:
    """Writable dataclass with the fields of a config class and ``_target_``."""
    hints = typing.get_type_hints(cls)
    entries: list[tuple[str, Any, Any]] = [
        ("_target_", str, dataclasses.field(default=registry.target_name(cls)))
    ]
    entries += [
        (entry.name, _open_type(hints[entry.name]), _writable_type(entry))
        for entry in dataclasses.fields(cls)
    ]
    return _make_mirror(cls, entries)


def _run_schema_mirror() -> type:
    hints = typing.get_type_hints(RunConfig)
    entries: list[tuple[str, Any, Any]] = []
    for entry in dataclasses.fields(RunConfig):
        if entry.name in paths.CLOSED_GROUPS:
            entries.append((entry.name, Any, dataclasses.field(default=None)))
        elif entry.name not in ("choices", "overrides", "callbacks"):
            entries.append((entry.name, _open_type(hints[entry.name]), _writable_type(entry)))
    callbacks: Any = dataclasses.field(default_factory=dict)
    return _make_mirror(RunConfig, [*entries, ("callbacks", dict[str, Any], callbacks)])


def _make_mirror(cls: type, entries: list[tuple[str, Any, Any]]) -> type:
    """Build a dataclass with fields only; generating its methods is slow."""
    namespace = {"__doc__": cls.__doc__}  # the default docstring is a slow signature
    return dataclasses.make_dataclass(
        cls.__name__, entries, init=False, repr=False, eq=False, namespace=namespace
    )


def _open_type(declared_type: Any) -> Any:
    if typing.get_origin(declared_type) is tuple:
        return list[typing.get_args(declared_type)[0]]  # type: ignore[misc]  # built at run time
    if typing.get_origin(declared_type) is Mapping:
        return dict[typing.get_args(declared_type)]  # type: ignore[misc]  # built at run time
    return declared_type


def _writable_type(entry: "dataclasses.Field[Any]") -> Any:
    if entry.default is not dataclasses.MISSING:
        if isinstance(entry.default, tuple):
            values = list(entry.default)
            return dataclasses.field(default_factory=lambda: list(values))
        return dataclasses.field(default=entry.default)
    if entry.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=entry.default_factory)
    return dataclasses.field(default="???")
