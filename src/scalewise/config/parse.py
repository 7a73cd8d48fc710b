"""From a composed DictConfig to a Run: past this file nobody sees OmegaConf."""

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

from scalewise import typed_override
from scalewise.config import hardware_detection, paths, registry
from scalewise.config.renamed_targets import RENAMED_TARGETS
from scalewise.config.schemas import schema_mirror
from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigError, ConfigIssue, format_value
from scalewise.redaction import HIDDEN, contains_secret
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override

TRUSTED = "trusted_packages"
_PLAIN = ("name", "seed", "question", "resume", TRUSTED)
_ENVIRONMENT = re.compile(r"oc\.env\s*:\s*['\"]?([^,}'\"]*)")
WOULD_REVEAL = "would write a secret of the environment into the run's folder"
LEAVE_OUT = "leave it out: what needs it reads it from the environment"


def parse_run(
    config: DictConfig,
    overrides: Iterable[str],
    cli_overrides: Iterable[str],
    *,
    check_machine: bool = True,
) -> RunConfig:
    """Returns the settled Run of a composed config that still holds its ``hydra`` node.

    ``cli_overrides``: the overrides of the command line alone, which may trust packages.

    Raises ``ConfigError`` with every complaint; those about the present machine only if
    ``check_machine``.
    An interpolation may read the environment, but not what is named like a secret there: the
    resolved config is written to the run's folder and sent to the tracker.
    """
    issues: list[ConfigIssue] = []
    run = compose_unresolved(config, overrides, issues).resolve()
    issues += untrusted_packages(run.trusted_packages, cli_overrides)
    issues += run.validate()
    if check_machine:
        issues += run.validate_machine()
    if issues:
        raise ConfigError(issues)
    return run


def compose_unresolved(
    config: DictConfig, overrides: Iterable[str], issues: list[ConfigIssue]
) -> RunConfig:
    """Returns the Run as composed, before its parts are asked what is wrong; adds unknown keys.

    Raises ``ConfigError`` where there is no Run: a part is unknown, a value cannot be had.
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
        issues.append(ConfigIssue("callbacks", callbacks, "is no mapping of names to callbacks"))
        callbacks = {}
    for callback in callbacks.values():
        if isinstance(callback, dict) and callback.get("_target_") in RENAMED_TARGETS:
            callback["_target_"] = RENAMED_TARGETS[callback["_target_"]]
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
    """Yields packages that only a file trusts: it would run code of its own by itself."""
    if not packages:
        return
    trusted = {package for line in cli_overrides for package in _trusted_by(line)}
    if any(package not in trusted for package in packages):
        reason = "is set by a file; only the command line may trust packages"
        fix = f"if you trust them, type {typed_override.format_override(TRUSTED, packages)}"
        yield ConfigIssue(TRUSTED, list(packages), reason, fix)


def _trusted_by(override_text: str) -> Iterator[str]:
    """Yields the packages that an override of the command line trusts, in any job of a sweep."""
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
        if isinstance(value, str):  # a list that a sweep yields as text
            value = OverridesParser.create().parse_override(f"{TRUSTED}={value}").value()
        yield from map(str, value if isinstance(value, list) else ())


def parse_group(group: str, recorded_values: Mapping[str, object]) -> Any:
    """Returns the spec that ``resolved.yaml`` holds of a closed group.

    Raises ``ConfigError`` where it is none of ours, or of a version with other fields.
    """
    registry.import_options()
    issues: list[ConfigIssue] = []
    target = str(recorded_values.get("_target_"))
    known = registry.registered_targets().get(target)
    values: object = dict(recorded_values)
    if hidden := [key for key, value in recorded_values.items() if HIDDEN in str(value)]:
        reason = "was a secret, which is not written down"
        fix = "train again without it: what needs it reads it from the environment"
        raise ConfigError.for_key(f"{group}.{hidden[0]}", recorded_values[hidden[0]], reason, fix)
    if known is not None:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema_mirror(known)), values)
            values = _plain(merged)
        except OmegaConfBaseException as error:
            reason = f"is of another version: {str(error).splitlines()[0]}"
            raise ConfigError.for_key(group, target, reason) from error
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError.for_key(group, target, f"has no {', '.join(missing)}")
        converted = OmegaConf.to_container(merged, enum_to_str=True)
        assert isinstance(converted, dict)
        for key, value in recorded_values.items():
            if converted[key] != value:  # what a run has written is of the declared type
                reason = f"{key} is {format_value(value)}, not of the type of that field"
                raise ConfigError.for_key(group, target, reason)
    found = _parse_part(group, values, issues)
    if issues:
        raise ConfigError(issues)
    return found


def parse_value(key: str, text: str, fix: str) -> object:
    """Returns the value of an override as Hydra reads it; raises ``ConfigError`` with ``fix``."""
    try:
        return OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        reason = f"cannot be read: {str(error).splitlines()[0]}"
        raise ConfigError.for_key(key, text, reason, fix) from error


def _resolved_values(config: DictConfig) -> dict[str, Any]:
    """Returns the config without its ``hydra`` node, resolved while that is still there."""
    known = (*_PLAIN, *paths.GROUPS)
    nodes = config.items_ex(resolve=False)
    raw = {str(key): _unresolved_entry(node) for key, node in nodes if key != "hydra"}
    issues = [
        ConfigIssue(key, value, "no such key", did_you_mean(key, known))
        for key, value in raw.items()
        if key not in known
    ]
    issues += [
        ConfigIssue(key, None, "cannot be left out", f"give it another value: {key}=VALUE")
        for key in known
        if key not in raw
    ]
    issues += _entry_issues(config, {key: raw[key] for key in known if key in raw}, "")
    if issues:
        raise ConfigError(issues)
    plain = {key: _plain(config[key]) if "${" in str(raw[key]) else raw[key] for key in known}
    texts = list(_iter_strings(plain, ""))
    if contains_secret("\n".join(text for _, text in texts)):  # one search: each costs 0.1 ms
        issues = [
            ConfigIssue(key, text, WOULD_REVEAL, LEAVE_OUT)
            for key, text in texts
            if contains_secret(text)
        ]
    if issues:
        raise ConfigError(issues)
    return plain


def _iter_strings(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yields each text of a plain config, names of entries too, with the key that it is under."""
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
    """Returns an entry as it was written, nothing resolved."""
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def _plain(value: object) -> object:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _entry_issues(config: Any, raw_values: Any, prefix: str) -> Iterator[ConfigIssue]:
    """Yields the entries that are missing, tell a secret or refer to what does not exist."""
    for name, value in (
        raw_values.items() if isinstance(raw_values, dict) else enumerate(raw_values)
    ):
        key = f"{prefix}{name}"
        if value == "???":
            yield ConfigIssue(key, "???", "must be given", f"add {key}=VALUE")
        elif isinstance(value, str) and "${" in value and OmegaConf.is_interpolation(config, name):
            yield from _interpolation_issue(config, name, key, str(value))
        elif isinstance(value, dict | list):
            yield from _entry_issues(config[name], value, f"{key}.")


def _interpolation_issue(config: Any, name: Any, key: str, raw_value: str) -> Iterator[ConfigIssue]:
    if any("${" in name for name in _ENVIRONMENT.findall(raw_value)):
        yield ConfigIssue(key, raw_value, WOULD_REVEAL, LEAVE_OUT)
        return
    try:
        _plain(config[name])
    except (OmegaConfBaseException, RecursionError) as error:
        yield unresolved_issue(key, raw_value, error)


def unresolved_issue(key: str, raw_value: object, error: Exception) -> ConfigIssue:
    """Returns the complaint about an interpolation that raised ``error`` as it was resolved."""
    said = str(error).splitlines()[0].split("raised while resolving interpolation: ")[-1]
    if "recursi" in str(error).lower():
        said = "refers to itself"
    fix = "give a default: ${oc.env:NAME,default}" if "Environment variable" in said else ""
    if WOULD_REVEAL in said:
        said, fix = WOULD_REVEAL, LEAVE_OUT
    return ConfigIssue(key, raw_value, said.strip('"'), fix)


@cache
def _field_types(cls: type) -> Mapping[str, Any]:
    """Returns the declared types of a class's fields: looking them up takes longer than a part."""
    return typing.get_type_hints(cls)


def _parse_part(group: str, values: object, issues: list[ConfigIssue]) -> Any:
    given = values.get("_target_") if isinstance(values, Mapping) else None
    cls = registry.registered_targets().get(str(given))
    if cls is None or cls not in registry.OPTIONS.get(group, {}).values():
        issues.append(
            ConfigIssue(
                f"{group}._target_" if given else group,
                given if given else values,
                f"is no registered option of {group}",
                f"choose one of {group}={', '.join(paths.option_names(group))}",
            )
        )
        return None
    assert isinstance(values, Mapping)
    keys = [entry.name for entry in dataclasses.fields(cls)]
    if lacking := [key for key in keys if key not in values]:
        reason = f"has other keys than the option chosen: {', '.join(lacking[:3])}"
        fix = f"choose one of {group}={', '.join(paths.option_names(group))}"
        issues.append(ConfigIssue(f"{group}._target_", given, reason, fix))
        return None
    unknown = [str(key) for key in values if key not in ("_target_", *keys)]
    issues += [
        ConfigIssue(
            f"{group}.{key}", values[key], "no such key", did_you_mean(key, keys, f"{group}.")
        )
        for key in unknown
    ]
    hints = _field_types(cls)
    return cls(
        **{
            key: _convert_to_declared(hints[key], f"{group}.{key}", values[key], issues)
            for key in keys
        }
    )


def _convert_to_declared(
    declared_type: Any, key: str, value: Any, issues: list[ConfigIssue]
) -> Any:
    """Returns a value of the composed config as a spec holds it: its lists are tuples of texts."""
    if typing.get_origin(declared_type) is not tuple:
        return value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        fix = f"write {format_override(key, ['TEXT'])}"
        issues.append(ConfigIssue(key, value, "is not a list of texts", fix))
        return ()
    return tuple(value)
