"""Schemas that Hydra checks overrides against, derived from the registered config classes.

OmegaConf makes a frozen dataclass read-only, and a structured node rejects ``_target_``. Therefore
each config class gets a writable mirror class with ``_target_`` as its first field.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
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


@cache
def group_types() -> Mapping[object, str]:
    """Group of each base class of options: ``data`` for ``DataConfig``."""
    hints = typing.get_type_hints(RunConfig)
    return {hints[group]: group for group in paths.CLOSED_GROUPS}


def entry_class(declared_type: object) -> type | None:
    """Dataclass of the entries of a mapping; None for other types."""
    if typing.get_origin(declared_type) is not Mapping:
        return None
    value_type: Any = typing.get_args(declared_type)[1]
    is_class = isinstance(value_type, type) and dataclasses.is_dataclass(value_type)
    return value_type if is_class else None


def schema_mirror(cls: type) -> type:
    """Writable dataclass with the fields of a config class and ``_target_``."""
    target = ("_target_", str, dataclasses.field(default=registry.target_name(cls)))
    return _make_mirror(cls, [target, *_field_mirrors(cls)])


@cache
def nested_mirror(cls: type) -> type:
    """Writable dataclass with the fields of the values of a mapping."""
    return _make_mirror(cls, [*_field_mirrors(cls)])


def _field_mirrors(cls: type) -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        if hints[entry.name] in group_types():  # an option that the defaults list composes
            yield entry.name, Any, dataclasses.field(default=None)
        else:
            yield entry.name, _open_type(hints[entry.name]), _writable_type(entry)


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
        if (cls := entry_class(declared_type)) is None:
            return dict[typing.get_args(declared_type)]  # type: ignore[misc]  # built at run time
        # OmegaConf adds only entries of any type by a dotted key, such as +data.stages.x.start=0.
        has_options = group_types().keys() & {*typing.get_type_hints(cls).values()}
        return dict[str, nested_mirror(cls) if has_options else Any]  # type: ignore[misc]  # built at run time
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
