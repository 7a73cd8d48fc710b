"""Config issues of overrides of fields: an unknown key, or a value of the wrong type.

For malformed text Hydra and OmegaConf raise many exception types, hence the broad ``except``.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from scalewise import registry
from scalewise.config import paths
from scalewise.config.parsed_overrides import display_value, override_key, override_values
from scalewise.config.schemas import group_types
from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override, shell_word

COMPOSING = " raised while composing config:"
"""End of a line of Hydra that names a file; the next line has the reason."""


def value_issues(
    override: Override, config: DictConfig, loader: ConfigLoader
) -> Iterator[ConfigIssue]:
    """Yield issues of an override of a field: its key, its value, or the type of the value."""
    key = override_key(override)
    if key.split(".")[0].split("/")[0] == "hydra" or override.package is not None:
        return
    adds = override.is_add() or override.is_force_add()
    if (group := group_types().get(_declared_type(key, config))) and "." in key:
        word = f"{group}@{key}={display_value(override)}"
        fix = f"write {word if _node_at(config, key) is not None else f'+{word}'}"
        yield ConfigIssue(key, display_value(override), f"is an option of {group}", fix)
        return
    if not adds and not _exists(config, key):
        shown_value = display_value(override)
        fix = _closest_key(key, config, loader)
        is_new = _accepts_new_keys(key.rpartition(".")[0], config) and not override.is_delete()
        if is_new and not fix.startswith("did you mean"):
            fix = f"to add an entry, write {shell_word(f'+{key}={shown_value}')}"
        yield ConfigIssue(key, shown_value, "no such key", fix)
        return
    if override.is_delete():
        if not key.startswith("callbacks."):
            fix = f"set {key}=VALUE"
            yield ConfigIssue(key, None, "cannot be deleted", fix)
        return
    default = _node_at(config, key)
    for value in override_values(override):
        if isinstance(value, dict) and not adds and _accepts_new_keys(key, config):
            fix = f"write {shell_word(f'+{key}={display_value(override)}')}"
            yield ConfigIssue(key, display_value(override), "adds entries", fix)
            continue
        try:
            with open_dict(config):
                OmegaConf.update(config, key, value, merge=True, force_add=adds)
        except Exception as error:
            yield _type_issue(key, value, default, _declared_type(key, config), error)


def _accepts_new_keys(key: str, config: DictConfig) -> bool:
    """Return whether a key accepts entries of any name."""
    declared = typing.get_origin(_declared_type(key, config))
    return key.split(".")[0] == "callbacks" or declared is Mapping


def _exists(config: DictConfig, key: str) -> bool:
    *parents, leaf = key.split(".")
    node = _node_at(config, ".".join(parents)) if parents else config
    return isinstance(node, DictConfig) and leaf in node


def _node_at(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except Exception:  # a malformed key or a failing interpolation
        return None


def _type_issue(
    key: str, value: object, default: object, declared_type: Any, error: Exception
) -> ConfigIssue:
    """Config issue of a value that is not of the declared type of its key."""
    kinds = (
        typing.get_args(declared_type) if isinstance(declared_type, UnionType) else (declared_type,)
    )
    kind: Any = next((kind for kind in kinds if kind is not type(None)), None)
    fix = (
        f"the default is {format_override(key, default)}"
        if isinstance(default, str | int | float) and default != ""
        else ""
    )
    if declared_type is None or (isinstance(value, str) and "${" in value):
        return ConfigIssue(key, value, first_sentence(error), fix)
    if value is None:
        return ConfigIssue(key, value, "cannot be null", fix)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.name for member in kind]
        close = did_you_mean(str(value), names)
        reason = f"is not one of {', '.join(names)}"
        return ConfigIssue(key, value, reason, close if close.startswith("did") else fix)
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return ConfigIssue(key, value, "is not an integer", f"set {key}={int(value)}")
    if typing.get_origin(kind) is tuple:
        entry = "TEXT" if isinstance(value, dict | list) else value
        return ConfigIssue(key, value, "is not a list", f"set {format_override(key, [entry])}")
    reason = {
        int: "is not an integer",
        float: "is not a number",
        bool: "is not true or false",
        str: "is not a string",
    }.get(kind, first_sentence(error))
    return ConfigIssue(key, value, reason, fix)


def _declared_type(key: str, config: DictConfig) -> Any:
    """Type that a config class declares for a key; None without a declaration."""
    group, _, field = key.partition(".")
    if not field:
        return None if group in paths.GROUPS else typing.get_type_hints(RunConfig).get(group)
    declared: Any = _option_class(group, config)
    parent = group
    for part in field.split("."):
        if typing.get_origin(declared) is Mapping:
            declared = typing.get_args(declared)[1]
        elif dataclasses.is_dataclass(declared):
            declared = typing.get_type_hints(declared).get(part)
        elif declared in group_types():
            declared = typing.get_type_hints(_option_class(parent, config)).get(part)
        else:
            return None
        parent = f"{parent}.{part}"
    return declared


def _option_class(key: str, config: DictConfig) -> type | None:
    return registry.registered_targets().get(str(_node_at(config, f"{key}._target_")))


def _closest_key(key: str, config: DictConfig, loader: ConfigLoader) -> str:
    *parents, leaf = key.split(".")
    node = _node_at(config, ".".join(parents)) if parents else config
    if not isinstance(node, DictConfig):
        return _closest_key(".".join(parents), config, loader) if len(parents) else ""
    if leaf in node:
        return f"{key} has no keys below it"
    group = ".".join(parents)
    schemas = [
        name
        for name, cls in registry.OPTIONS.get(group, {}).items()
        if leaf in (entry.name for entry in dataclasses.fields(cls))
    ]
    if options := sorted(name for schema in schemas for name in paths.option_names(group, schema)):
        return f"it is a key of {group}={', '.join(options)}"
    names = [str(name) for name in node if name not in ("_target_", "hydra")]
    if not parents:
        names += paths.PRESETS
    return did_you_mean(leaf, names, ".".join([*parents, ""]))


def first_sentence(error: Exception) -> str:
    """First sentence of an exception of Hydra or OmegaConf."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if type(error) is KeyError:  # of an environment variable; its text is the name alone
        return f"names {error}, which is not set"
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(COMPOSING):
        return f"{lines[0].partition(':')[0]}: {lines[1].strip()}"
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
