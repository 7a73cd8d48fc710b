"""Parser of a composed ``DictConfig`` into a run of plain dataclasses."""

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalewise import registry, typed_override
from scalewise.config import hardware_detection, paths
from scalewise.config.schemas import entry_class, group_types, nested_mirror, schema_mirror
from scalewise.errors import ConfigError, ConfigIssue, did_you_mean, format_value
from scalewise.redaction import HIDDEN, contains_secret
from scalewise.renamed_targets import RENAMED_TARGETS
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override
from scalewise.validation.run_issues import iter_issues, iter_machine_issues

TRUSTED = "trusted_packages"
_PLAIN = ("name", "seed", "question", "resume", TRUSTED)
_ENVIRONMENT = re.compile(r"oc\.env\s*:\s*['\"]?([^,}'\"]*)")
LEAK_REASON = "writes a secret of the environment to the run folder"
LEAK_FIX = "remove it; libraries read the secret from the environment"


def parse_run(
    config: DictConfig,
    overrides: Iterable[str],
    cli_overrides: Iterable[str],
    *,
    check_machine: bool = True,
) -> RunConfig:
    """Parse, resolve and validate the run of a composed config.

    An interpolation may read environment variables, but no secrets, because the resolved config is
    written to the run folder and sent to W&B.

    Args:
        config: Composed config with its ``hydra`` node.
        overrides: Overrides to record in the run.
        cli_overrides: Overrides of the command line, the only ones that may trust packages.
        check_machine: Whether the run is also validated against this machine.

    Raises:
        ConfigError: The config is rejected; the error contains every config issue.
    """
    issues: list[ConfigIssue] = []
    run = compose_unresolved(config, overrides, issues).resolve()
    issues += untrusted_packages(run.trusted_packages, cli_overrides)
    issues += iter_issues(run)
    if check_machine:
        issues += iter_machine_issues(run)
    if issues:
        raise ConfigError(issues)
    return run


def compose_unresolved(
    config: DictConfig, overrides: Iterable[str], issues: list[ConfigIssue]
) -> RunConfig:
    """Parse a composed config without resolving or validating it; add issues to ``issues``.

    Raises ``ConfigError`` if an option is unknown or a value cannot be resolved.
    """
    choices = {
        group: str(choice)
        for group, choice in config.hydra.runtime.choices.items()
        if group in (*paths.GROUPS, "experiment", "sweep", "inject") and choice is not None
    }
    values = _resolved_values(config)
    parts = {group: _parse_part(group, values[group], issues) for group in paths.CLOSED_GROUPS}
    if None in parts.values():
        raise ConfigError(issues)
    parts["hardware"] = hardware_detection.detect_hardware(parts["hardware"])
    hints = _field_types(RunConfig)
    plain = {key: _convert_to_declared(hints[key], key, values[key], issues) for key in _PLAIN}
    callbacks = values["callbacks"]
    if not isinstance(callbacks, Mapping):
        issues.append(ConfigIssue("callbacks", callbacks, "is not a mapping of names to callbacks"))
        callbacks = {}
    for callback in callbacks.values():
        target = callback.get("_target_") if isinstance(callback, dict) else None
        if isinstance(target, str):  # other types are rejected by validation
            callback["_target_"] = RENAMED_TARGETS.get(target, target)
    return RunConfig(
        **parts,
        **plain,
        callbacks=callbacks,
        choices=choices,
        overrides=tuple(overrides),
    )


def untrusted_packages(
    packages: Sequence[str], cli_overrides: Iterable[str]
) -> Iterator[ConfigIssue]:
    """Yield an issue for packages that only a config file trusts, because it can run code."""
    if not packages:
        return
    trusted = {package for line in cli_overrides for package in _trusted_by(line)}
    if any(package not in trusted for package in packages):
        reason = "is set by a file; only the command line may trust packages"
        fix = f"if you trust them, add {typed_override.format_override(TRUSTED, packages)}"
        yield ConfigIssue(TRUSTED, list(packages), reason, fix)


def _trusted_by(override_text: str) -> Iterator[str]:
    """Yield the packages that an override trusts, in any job of a sweep."""
    try:
        override = OverridesParser.create().parse_override(override_text)
    except HydraException:
        return
    if override.key_or_group != TRUSTED or override.is_delete():
        return
    if override.is_range_sweep():
        return
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        if isinstance(value, str):  # a sweep yields lists as strings
            value = OverridesParser.create().parse_override(f"{TRUSTED}={value}").value()
        yield from map(str, value if isinstance(value, list) else ())


def parse_group(group: str, recorded_values: Mapping[str, object]) -> Any:
    """Parse the config of one group in ``resolved.yaml``.

    Raises ``ConfigError`` if its class is not registered or its fields are of another version.
    """
    registry.import_options()
    issues: list[ConfigIssue] = []
    target = str(recorded_values.get("_target_"))
    cls = registry.registered_targets().get(target)
    values: object = dict(recorded_values)
    if redacted := [key for key, value in recorded_values.items() if HIDDEN in str(value)]:
        reason = "was a secret, which is not recorded"
        fix = "train again without it; libraries read the secret from the environment"
        raise ConfigError.for_key(
            f"{group}.{redacted[0]}", recorded_values[redacted[0]], reason, fix
        )
    if cls is not None:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema_mirror(cls)), values)
            values = _plain(merged)
        except OmegaConfBaseException as error:
            reason = f"is of another version: {str(error).splitlines()[0]}"
            raise ConfigError.for_key(group, target, reason) from error
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError.for_key(group, target, f"has no {', '.join(missing)}")
        converted = OmegaConf.to_container(merged, enum_to_str=True)
        assert isinstance(converted, dict)
        for key, value in recorded_values.items():
            if converted[key] != value:  # a run records values of the declared type
                reason = f"{key}={format_value(value)} is not of the declared type"
                raise ConfigError.for_key(group, target, reason)
    config = _parse_part(group, values, issues)
    if issues:
        raise ConfigError(issues)
    return config


def parse_value(key: str, text: str, fix: str) -> object:
    """Parse the value of an override with Hydra; raises ``ConfigError`` with ``fix``."""
    try:
        return OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        reason = f"cannot be parsed: {str(error).splitlines()[0]}"
        raise ConfigError.for_key(key, text, reason, fix) from error


def _resolved_values(config: DictConfig) -> dict[str, Any]:
    """Resolve the config and return it without its ``hydra`` node."""
    keys = (*_PLAIN, *paths.GROUPS)
    nodes = config.items_ex(resolve=False)
    raw = {str(key): _unresolved_entry(node) for key, node in nodes if key != "hydra"}
    issues = [
        ConfigIssue(key, value, "no such key", did_you_mean(key, keys))
        for key, value in raw.items()
        if key not in keys
    ]
    issues += [
        ConfigIssue(key, None, "cannot be deleted", f"set {key}=VALUE")
        for key in keys
        if key not in raw
    ]
    issues += _entry_issues(config, {key: raw[key] for key in keys if key in raw}, "")
    if issues:
        raise ConfigError(issues)
    plain = {key: _plain(config[key]) if "${" in str(raw[key]) else raw[key] for key in keys}
    texts = list(_iter_strings(plain, ""))
    if contains_secret("\n".join(text for _, text in texts)):  # one search: each costs 0.1 ms
        issues = [
            ConfigIssue(key, text, LEAK_REASON, LEAK_FIX)
            for key, text in texts
            if contains_secret(text)
        ]
    if issues:
        raise ConfigError(issues)
    return plain


def _iter_strings(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield each string of a plain config, keys included, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield key, str(name)
            yield from _iter_strings(entry, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _iter_strings(entry, f"{key}.{number}")


def _unresolved_entry(node: Any) -> object:
    """Entry with interpolations unresolved."""
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def _plain(value: object) -> object:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _entry_issues(config: Any, raw_values: Any, prefix: str) -> Iterator[ConfigIssue]:
    """Yield issues for missing values, secrets and interpolations that cannot be resolved."""
    for name, value in (
        raw_values.items() if isinstance(raw_values, dict) else enumerate(raw_values)
    ):
        key = f"{prefix}{name}"
        if value == "???":
            yield ConfigIssue(key, "???", "is required", f"set {key}=VALUE")
        elif isinstance(value, str) and "${" in value and OmegaConf.is_interpolation(config, name):
            yield from _interpolation_issue(config, name, key, str(value))
        elif isinstance(value, dict | list):
            yield from _entry_issues(config[name], value, f"{key}.")


def _interpolation_issue(config: Any, name: Any, key: str, raw_value: str) -> Iterator[ConfigIssue]:
    if any("${" in name for name in _ENVIRONMENT.findall(raw_value)):
        yield ConfigIssue(key, raw_value, LEAK_REASON, LEAK_FIX)
        return
    try:
        _plain(config[name])
    except (OmegaConfBaseException, RecursionError) as error:
        yield unresolved_issue(key, raw_value, error)


def unresolved_issue(key: str, raw_value: object, error: Exception) -> ConfigIssue:
    """Config issue of an interpolation that raised ``error``."""
    reason = str(error).splitlines()[0].split("raised while resolving interpolation: ")[-1]
    if "recursi" in str(error).lower():
        reason = "refers to itself"
    fix = "add a default: ${oc.env:NAME,default}" if "Environment variable" in reason else ""
    if LEAK_REASON in reason:
        reason, fix = LEAK_REASON, LEAK_FIX
    return ConfigIssue(key, raw_value, reason.strip('"'), fix)


@cache
def _field_types(cls: type) -> Mapping[str, Any]:
    """Declared types of the fields of a class, cached because the lookup is slow."""
    return typing.get_type_hints(cls)


def _parse_part(group: str, values: object, issues: list[ConfigIssue], prefix: str = "") -> Any:
    """Parse an option of a group; ``prefix`` is its key, if it is part of another option."""
    key, choice = prefix or group, group
    if prefix:
        choice = f"{'+' if values is None else ''}{group}@{prefix}"
    target = values.get("_target_") if isinstance(values, Mapping) else None
    cls = registry.registered_targets().get(str(target))
    if cls is None or cls not in registry.OPTIONS.get(group, {}).values():
        issues.append(
            ConfigIssue(
                f"{key}._target_" if target else key,
                target if target else values,
                f"is not a registered option of {group}",
                f"choose one of {choice}={', '.join(paths.option_names(group))}",
            )
        )
        return None
    assert isinstance(values, Mapping)
    keys = [entry.name for entry in dataclasses.fields(cls)]
    if missing := [key for key in keys if key not in values]:
        reason = f"has keys that the chosen option lacks: {', '.join(missing[:3])}"
        fix = f"choose one of {group}={', '.join(paths.option_names(group))}"
        issues.append(ConfigIssue(f"{key}._target_", target, reason, fix))
        return None
    return _parse_fields(cls, values, issues, key)


def _parse_fields(
    cls: type, values: Mapping[str, Any], issues: list[ConfigIssue], prefix: str
) -> Any:
    """Build a config dataclass from the values of its fields."""
    keys = [entry.name for entry in dataclasses.fields(cls)]
    unknown = [str(key) for key in values if key not in ("_target_", *keys)]
    issues += [
        ConfigIssue(
            f"{prefix}.{key}", values[key], "no such key", did_you_mean(key, keys, f"{prefix}.")
        )
        for key in unknown
    ]
    hints = _field_types(cls)
    return cls(
        **{
            key: _convert_to_declared(hints[key], f"{prefix}.{key}", values[key], issues)
            for key in keys
        }
    )


def _parse_entry(cls: type, value: object, issues: list[ConfigIssue], key: str) -> Any:
    """Parse an entry of a mapping to dataclasses; None if a value has another type."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(nested_mirror(cls)), value)
    except (OmegaConfBaseException, ValueError) as error:
        full_key = f"{key}.{getattr(error, 'full_key', None) or ''}".rstrip(".")
        issues.append(ConfigIssue(full_key, value, str(error).splitlines()[0]))
        return None
    plain: Any = OmegaConf.to_container(merged, enum_to_str=True)
    return _parse_fields(cls, plain, issues, key)


def _convert_to_declared(
    declared_type: Any, key: str, value: Any, issues: list[ConfigIssue]
) -> Any:
    """Convert a value of the composed config to its declared type: lists become tuples.

    Raises ``ConfigError`` for an invalid option of a group within another option.
    """
    if (group := group_types().get(declared_type)) is not None:
        if (config := _parse_part(group, value, issues, key)) is None:
            raise ConfigError(issues)
        return config
    if (cls := entry_class(declared_type)) is not None:
        entries = {
            name: _parse_entry(cls, entry, issues, f"{key}.{name}") for name, entry in value.items()
        }
        return {name: entry for name, entry in entries.items() if entry is not None}
    if typing.get_origin(declared_type) is Mapping and float in typing.get_args(declared_type):
        # OmegaConf accepts a mapping as an entry of any type.
        nested = {name: entry for name, entry in value.items() if isinstance(entry, Mapping)}
        issues += [
            ConfigIssue(f"{key}.{name}", entry, "is not a number", f"set +{key}.{name}=0.5")
            for name, entry in nested.items()
        ]
        return {name: entry for name, entry in value.items() if name not in nested}
    if typing.get_origin(declared_type) is not tuple:
        return value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        fix = f"set {format_override(key, ['TEXT'])}"
        issues.append(ConfigIssue(key, value, "is not a list of strings", fix))
        return ()
    return tuple(value)
