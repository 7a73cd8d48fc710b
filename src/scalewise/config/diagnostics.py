"""Says what is wrong with a command line: every complaint at once, each with a cure.

Hydra stops at its first error, so a refused line is looked at again, override by override. Hydra
and OmegaConf raise much beside their own errors when they meet odd text, hence the broad excepts.
"""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from types import UnionType
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from scalewise.config import paths, registry, sweep_grid
from scalewise.config.hydra_context import hydra_session
from scalewise.config.parse import LEAVE_OUT, WOULD_REVEAL, parse_run, unresolved_issue
from scalewise.config.suggestions import did_you_mean, suggested_option
from scalewise.errors import ConfigError, ConfigIssue, ScalewiseError, format_value
from scalewise.redaction import contains_secret
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override, shell_word

MAX_SWEEP_LENGTH = 100
"""So many values of a sweep are looked at one by one; every job is validated anyway."""

COMPOSING = " raised while composing config:"
"""Ends a line of Hydra's that names a file; what is wrong with it is in the next one."""
PRESETS = ("experiment", "sweep")
"""Groups whose options set keys of others."""
GRAMMAR = "write it as group=option or group.key=value, quoted where it has blanks"


def translate_hydra_error(
    error: Exception, overrides: Sequence[str], *, check_machine: bool = True
) -> Exception:
    """Returns the error to show for one that came out of Hydra; ours pass through, completed."""
    if isinstance(error, ScalewiseError) and not isinstance(error, ConfigError):
        return error
    found = diagnose_overrides(overrides, check_machine=check_machine)
    known = error.issues if isinstance(error, ConfigError) else ()
    if "multirun" in str(error):
        found += [c for text in overrides for c in _sweep_issues(_parse_override(text, []))]
    together = {str(issue): issue for issue in (*found, *known)}
    return ConfigError(together.values() or [_issue_from_error(error, overrides)])


def _issue_from_error(error: Exception, overrides: Sequence[str]) -> ConfigIssue:
    """Returns the complaint about what Hydra raised, with its key where that is known."""
    key = getattr(error, "full_key", None)
    if not (isinstance(error, InterpolationResolutionError) and key):
        return ConfigIssue("", "", _first_sentence(error))
    typed = {key.lstrip("+"): value for key, _, value in (it.partition("=") for it in overrides)}
    return unresolved_issue(key, typed.get(key, "${...}"), error)


def _sweep_issues(override: Override | None) -> Iterator[ConfigIssue]:
    if override is not None and override.is_sweep_override():
        fix = "add -m for a sweep, or quote the comma of a text"
        yield ConfigIssue(
            _key(override), _display_value(override), "is several values, for one run", fix
        )


def unparsable_overrides(overrides: Iterable[object]) -> Iterator[ConfigIssue]:
    """Yields what is no override at all, and would not even be written down."""
    for text in overrides:
        if not isinstance(text, str):
            yield ConfigIssue("", "", f"an override is a text, not {text!r}", GRAMMAR)
        elif text.startswith("-"):
            reason = f"{text!r} is a flag of the command line, not an override"
            yield ConfigIssue("", "", reason, "leave it out")
        elif any("\ud800" <= character <= "\udfff" for character in text):
            yield ConfigIssue("", "", f"the override {text!a} is not valid UTF-8", "retype it")
        elif contains_secret(text):
            key, _, value = text.partition("=")
            yield ConfigIssue(key, value, WOULD_REVEAL, LEAVE_OUT)


def diagnose_overrides(
    overrides: Iterable[str], *, check_machine: bool = True
) -> list[ConfigIssue]:
    """Returns what is wrong with these overrides, one complaint each, then across groups."""
    lines = list(overrides)
    if issues := list(unparsable_overrides(lines)):
        return issues
    with hydra_session() as loader:
        parsed = [o for text in lines if (o := _parse_override(text, issues)) is not None]
        groups = [o for o in parsed if _option_names(_key(o), loader)]
        sound = [o for o in groups if not _add(issues, _choice_issue(o, loader))]
        values = [o for o in parsed if o not in groups]
        if issues and not sound and not values:
            return issues
        config, kept = _compose_compatible([o for o in sound if not o.is_sweep_override()], issues)
        if config is None:
            return issues
        sound = [o for o in values if not _add(issues, _value_issue(o, config, loader))]
        _add(issues, _hydra_issues(sound, kept))
        if any(issue.key in PRESETS for issue in issues):
            return issues  # the rules would judge values that the preset replaces
        try:
            parse_run(config, (), lines, check_machine=check_machine)
        except ConfigError as error:
            issues += error.issues
    return issues


def _parse_override(text: str, issues: list[ConfigIssue]) -> Override | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except Exception:  # the parser raises several types; all mean that it cannot be read
        override = None
    if override is None or not _key(override).strip("./@ "):
        issues.append(
            ConfigIssue("", "", f"cannot read the override '{format_value(text)}'", GRAMMAR)
        )
        return None
    return override


def _option_names(group: str, loader: ConfigLoader) -> list[str]:
    try:
        found = loader.get_group_options(group)
    except (OSError, ValueError):  # no name that a file could have
        return []
    if group.split("/")[0] not in (*paths.GROUPS, *PRESETS):
        return found
    inner = loader.list_groups(group)
    return found + [
        f"{name}/{leaf}" for name in inner for leaf in _option_names(f"{group}/{name}", loader)
    ]


def _compose_compatible(
    groups: Sequence[Override], issues: list[ConfigIssue]
) -> tuple[DictConfig | None, list[str]]:
    """Returns the config of those choices that go together, and their lines."""
    kept = [_text(override) for override in groups]
    config = _try(kept)
    if not isinstance(config, Exception):
        return config, kept
    kept, config = [], _try([])
    for override in sorted(groups, key=lambda it: _key(it) in PRESETS):
        text = _text(override)
        found = _try([*kept, text])
        if isinstance(found, Exception):
            issues.append(_issue_from_conflict(override, found, kept))
            kept = [*_choices_of(override, kept), *kept]
            config = _try(kept)
        else:
            kept, config = [*kept, text], found
    return (None if isinstance(config, Exception) else config), kept


def _issue_from_conflict(
    override: Override, error: Exception, compatible_overrides: Sequence[str]
) -> ConfigIssue:
    """Returns the complaint about a choice that cannot be composed after those that are kept.

    An experiment or a sweep that sets keys of an option is in conflict with another choice.
    """
    key = getattr(error.__context__, "full_key", None) or ""
    for choice in compatible_overrides if _key(override) in PRESETS else ():
        if key.startswith(choice.lstrip("+").partition("=")[0].replace("/", ".") + "."):
            reason = f"sets keys that {choice} lacks, such as {key}"
            fix = f"leave it out, or choose another {_key(override)}"
            return ConfigIssue(_key(override), _display_value(override), reason, fix)
    return ConfigIssue(_key(override), _display_value(override), _first_sentence(error))


def _choices_of(override: Override, compatible_overrides: Sequence[str]) -> list[str]:
    """Returns the options that an experiment chooses, so that keys below these are known."""
    config = _try([_text(override)]) if _key(override) in PRESETS else None
    if not isinstance(config, DictConfig):
        return []
    choices = OmegaConf.select(config, "hydra.runtime.choices")
    chosen = {line.partition("=")[0] for line in compatible_overrides}
    return [f"{group}={choices[group]}" for group in paths.CLOSED_GROUPS if group not in chosen]


def _hydra_issues(
    overrides: Sequence[Override], compatible_overrides: Sequence[str]
) -> Iterator[ConfigIssue]:
    """Yields what Hydra has against overrides that are sound by themselves."""
    single = [o for o in overrides if not o.is_sweep_override()]
    if not single or not isinstance(_try([*compatible_overrides, *map(_text, single)]), Exception):
        return
    for override in single:
        found = _try([*compatible_overrides, _text(override)])
        if isinstance(found, Exception):
            yield ConfigIssue(_key(override), _display_value(override), _first_sentence(found))


def _try(overrides: Sequence[str]) -> DictConfig | Exception:
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True)
    except Exception as error:
        return error


def _add(issues: list[ConfigIssue], new_issues: Iterable[ConfigIssue]) -> bool:
    new_issues = list(new_issues)
    issues += new_issues
    return bool(new_issues)


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _text(override: Override) -> str:
    return str(override.input_line)


def _display_value(override: Override) -> object:
    if override.is_delete():
        return None
    try:
        return override.get_value_string()
    except Exception:  # Hydra cannot write some values back: show what was typed
        return _text(override).partition("=")[2]


def _override_values(override: Override) -> list[Any]:
    """Returns the value of an override, or the first ones of a sweep."""
    if not override.is_sweep_override():
        return [_plain_value(override.value())]
    try:
        sweep_grid.bounded_count(override)  # a range that is shuffled is listed whole
        return [
            _plain_value(value) for value in islice(override.sweep_iterator(), MAX_SWEEP_LENGTH)
        ]
    except Exception:  # a glob, an interval, a range of no steps: Hydra's own business
        return []


def _plain_value(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain_value(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain_value(key): _plain_value(entry) for key, entry in value.items()}
    return value


def _choice_issue(override: Override, loader: ConfigLoader) -> Iterator[ConfigIssue]:
    group, text = _key(override), _text(override)
    if override.is_delete() or group.split("/")[0] == "hydra" or override.package is not None:
        return
    known = group in (*paths.GROUPS, *PRESETS)
    if override.is_add() and known:
        fix = f"leave out the +: {shell_word(text[1:])}"
        yield ConfigIssue(group, _display_value(override), "is chosen already", fix)
        return
    if not override.is_add() and not known:
        fix = f"put + before it: {shell_word('+' + text)}"
        yield ConfigIssue(group, _display_value(override), "is no group of a run at rest", fix)
        return
    options = _option_names(group, loader)
    for value in _override_values(override):
        if isinstance(value, dict):
            continue
        if value is None or (isinstance(value, list) and group != "callbacks"):
            optional = group in PRESETS
            fix = f"write {shell_word('~' + group)}" if optional else did_you_mean("", options)
            yield ConfigIssue(group, value, "one option is needed", fix)
            continue
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options:
                yield ConfigIssue(
                    group, choice, "no such option", suggested_option(group, str(choice), options)
                )


def _value_issue(
    override: Override, config: DictConfig, loader: ConfigLoader
) -> Iterator[ConfigIssue]:
    key = _key(override)
    if key.split(".")[0].split("/")[0] == "hydra" or override.package is not None:
        return
    adds = override.is_add() or override.is_force_add()
    if not adds and not _exists(config, key):
        shown = _display_value(override)
        fix = _closest_key(key, config, loader)
        if _accepts_new_keys(key.rpartition(".")[0], config) and not fix.startswith("did you mean"):
            fix = f"to add an entry, put + before the key: {shell_word(f'+{key}={shown}')}"
        yield ConfigIssue(key, shown, "no such key", fix)
        return
    if override.is_delete():
        if not key.startswith("callbacks."):
            fix = f"give it another value: {key}=VALUE"
            yield ConfigIssue(key, None, "cannot be left out", fix)
        return
    default = _node_at(config, key)
    for value in _override_values(override):
        if isinstance(value, dict) and not adds and _accepts_new_keys(key, config):
            fix = f"put + before the key: {shell_word(f'+{key}={_display_value(override)}')}"
            yield ConfigIssue(key, _display_value(override), "would add entries", fix)
            continue
        try:
            with open_dict(config):
                OmegaConf.update(config, key, value, merge=True, force_add=adds)
        except Exception as error:
            yield _type_issue(key, value, default, _declared_type(key, config), error)


def _accepts_new_keys(key: str, config: DictConfig) -> bool:
    """Returns whether entries of any name may be added under a key."""
    declared = typing.get_origin(_declared_type(key, config))
    return key.split(".")[0] == "callbacks" or declared is Mapping


def _exists(config: DictConfig, key: str) -> bool:
    *parents, leaf = key.split(".")
    node = _node_at(config, ".".join(parents)) if parents else config
    return isinstance(node, DictConfig) and leaf in node


def _node_at(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except Exception:  # a key that cannot be read, or an interpolation that fails, names no node
        return None


def _type_issue(
    key: str, value: object, default: object, declared_type: Any, error: Exception
) -> ConfigIssue:
    """Returns the complaint about a value that the key's declared type does not take."""
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
        return ConfigIssue(key, value, _first_sentence(error), fix)
    if value is None:
        return ConfigIssue(key, value, "cannot be null", fix)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.name for member in kind]
        close = did_you_mean(str(value), names)
        reason = f"is none of {', '.join(names)}"
        return ConfigIssue(key, value, reason, close if close.startswith("did") else fix)
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return ConfigIssue(key, value, "is not a whole number", f"write {key}={int(value)}")
    if typing.get_origin(kind) is tuple:
        return ConfigIssue(key, value, "is not a list", f"write {format_override(key, [value])}")
    reason = {
        int: "is not a whole number",
        float: "is not a number",
        bool: "is neither true nor false",
        str: "is not a text",
    }.get(kind, _first_sentence(error))
    return ConfigIssue(key, value, reason, fix)


def _declared_type(key: str, config: DictConfig) -> Any:
    """Returns the type that a spec declares for a key; None where none does."""
    group, _, field = key.partition(".")
    if not field:
        return None if group in paths.GROUPS else typing.get_type_hints(RunConfig).get(group)
    cls = registry.registered_targets().get(str(_node_at(config, f"{group}._target_")))
    return typing.get_type_hints(cls).get(field) if cls is not None else None


def _closest_key(key: str, config: DictConfig, loader: ConfigLoader) -> str:
    *parents, leaf = key.split(".")
    node = _node_at(config, ".".join(parents)) if parents else config
    if not isinstance(node, DictConfig):
        return _closest_key(".".join(parents), config, loader) if len(parents) else ""
    if leaf in node:
        return f"{key} holds no further keys"
    group = ".".join(parents)
    schemas = [
        name
        for name, cls in registry.OPTIONS.get(group, {}).items()
        if leaf in (entry.name for entry in dataclasses.fields(cls))
    ]
    if others := sorted(name for schema in schemas for name in paths.option_names(group, schema)):
        return f"it is a key of {group}={', '.join(others)}"
    names = [str(name) for name in node if name not in ("_target_", "hydra")]
    if not parents:
        names += PRESETS
    return did_you_mean(leaf, names, ".".join([*parents, ""]))


def _first_sentence(error: Exception) -> str:
    """Returns the first sentence of an error that is not ours."""
    if isinstance(error, RecursionError):
        return "is nested too deep"
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(COMPOSING):
        return f"{lines[0].partition(':')[0]}: {lines[1].strip()}"
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
