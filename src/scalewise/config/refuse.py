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

from scalewise.config import axes, registry, tree
from scalewise.config.near import chosen, meant
from scalewise.config.own import own_hydra
from scalewise.config.read import LEAVE_OUT, WOULD_REVEAL, read, unresolved
from scalewise.errors import Complaint, ConfigError, ScalewiseError, as_typed
from scalewise.redaction import holds_secret
from scalewise.run import Run
from scalewise.typed_override import shell_word, typed

LONGEST_SWEEP = 100
"""So many values of a sweep are looked at one by one; every job is validated anyway."""

COMPOSING = " raised while composing config:"
"""Ends a line of Hydra's that names a file; what is wrong with it is in the next one."""
PRESETS = ("experiment", "sweep")
"""Groups whose options set keys of others."""
GRAMMAR = "write it as group=option or group.key=value, quoted where it has blanks"


def translated(error: Exception, overrides: Sequence[str], *, here: bool = True) -> Exception:
    """Returns the error to show for one that came out of Hydra; ours pass through, completed."""
    if isinstance(error, ScalewiseError) and not isinstance(error, ConfigError):
        return error
    found = diagnose(overrides, here=here)
    known = error.complaints if isinstance(error, ConfigError) else ()
    if "multirun" in str(error):
        found += [c for text in overrides for c in _of_sweep(_parsed(text, []))]
    together = {str(complaint): complaint for complaint in (*found, *known)}
    return ConfigError(together.values() or [_of_error(error, overrides)])


def _of_error(error: Exception, overrides: Sequence[str]) -> Complaint:
    """Returns the complaint about what Hydra raised, with its key where that is known."""
    key = getattr(error, "full_key", None)
    if not (isinstance(error, InterpolationResolutionError) and key):
        return Complaint("", "", _sentence(error))
    typed = {key.lstrip("+"): value for key, _, value in (it.partition("=") for it in overrides)}
    return unresolved(key, typed.get(key, "${...}"), error)


def _of_sweep(override: Override | None) -> Iterator[Complaint]:
    if override is not None and override.is_sweep_override():
        cure = "add -m for a sweep, or quote the comma of a text"
        yield Complaint(_key(override), _shown(override), "is several values, for one run", cure)


def unreadable(overrides: Iterable[object]) -> Iterator[Complaint]:
    """Yields what is no override at all, and would not even be written down."""
    for text in overrides:
        if not isinstance(text, str):
            yield Complaint("", "", f"an override is a text, not {text!r}", GRAMMAR)
        elif text.startswith("-"):
            reason = f"{text!r} is a flag of the command line, not an override"
            yield Complaint("", "", reason, "leave it out")
        elif any("\ud800" <= character <= "\udfff" for character in text):
            yield Complaint("", "", f"the override {text!a} is not valid UTF-8", "retype it")
        elif holds_secret(text):
            key, _, value = text.partition("=")
            yield Complaint(key, value, WOULD_REVEAL, LEAVE_OUT)


def diagnose(overrides: Iterable[str], *, here: bool = True) -> list[Complaint]:
    """Returns what is wrong with these overrides, one complaint each, then across groups."""
    lines = list(overrides)
    if complaints := list(unreadable(lines)):
        return complaints
    with own_hydra() as loader:
        parsed = [o for text in lines if (o := _parsed(text, complaints)) is not None]
        groups = [o for o in parsed if _options(_key(o), loader)]
        sound = [o for o in groups if not _add(complaints, _of_choice(o, loader))]
        values = [o for o in parsed if o not in groups]
        if complaints and not sound and not values:
            return complaints
        config, kept = _composed([o for o in sound if not o.is_sweep_override()], complaints)
        if config is None:
            return complaints
        sound = [o for o in values if not _add(complaints, _of_value(o, config, loader))]
        _add(complaints, _of_hydra(sound, kept))
        if any(complaint.key in PRESETS for complaint in complaints):
            return complaints  # the rules would judge values that the preset replaces
        try:
            read(config, (), lines, here=here)
        except ConfigError as error:
            complaints += error.complaints
    return complaints


def _parsed(text: str, complaints: list[Complaint]) -> Override | None:
    try:
        override = OverridesParser.create().parse_override(text)
    except Exception:
        override = None
    if override is None or not _key(override).strip("./@ "):
        complaints.append(
            Complaint("", "", f"cannot read the override '{as_typed(text)}'", GRAMMAR)
        )
        return None
    return override


def _options(group: str, loader: ConfigLoader) -> list[str]:
    try:
        found = loader.get_group_options(group)
    except (OSError, ValueError):  # no name that a file could have
        return []
    if group.split("/")[0] not in (*tree.GROUPS, *PRESETS):
        return found
    inner = loader.list_groups(group)
    return found + [
        f"{name}/{leaf}" for name in inner for leaf in _options(f"{group}/{name}", loader)
    ]


def _composed(
    groups: Sequence[Override], complaints: list[Complaint]
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
            complaints.append(_of_conflict(override, found, kept))
            kept = [*_choices_of(override, kept), *kept]
            config = _try(kept)
        else:
            kept, config = [*kept, text], found
    return (None if isinstance(config, Exception) else config), kept


def _of_conflict(override: Override, error: Exception, kept: Sequence[str]) -> Complaint:
    """Returns the complaint about a choice that cannot be composed after those that are kept.

    An experiment or a sweep that sets keys of an option is in conflict with another choice.
    """
    key = getattr(error.__context__, "full_key", None) or ""
    for choice in kept if _key(override) in PRESETS else ():
        if key.startswith(choice.lstrip("+").partition("=")[0].replace("/", ".") + "."):
            reason = f"sets keys that {choice} lacks, such as {key}"
            cure = f"leave it out, or choose another {_key(override)}"
            return Complaint(_key(override), _shown(override), reason, cure)
    return Complaint(_key(override), _shown(override), _sentence(error))


def _choices_of(override: Override, kept: Sequence[str]) -> list[str]:
    """Returns the options that an experiment chooses, so that keys below these are known."""
    config = _try([_text(override)]) if _key(override) in PRESETS else None
    if not isinstance(config, DictConfig):
        return []
    choices = OmegaConf.select(config, "hydra.runtime.choices")
    chosen = {line.partition("=")[0] for line in kept}
    return [f"{group}={choices[group]}" for group in tree.CLOSED if group not in chosen]


def _of_hydra(values: Sequence[Override], kept: Sequence[str]) -> Iterator[Complaint]:
    """Yields what Hydra has against overrides that are sound by themselves."""
    single = [o for o in values if not o.is_sweep_override()]
    if not single or not isinstance(_try([*kept, *map(_text, single)]), Exception):
        return
    for override in single:
        found = _try([*kept, _text(override)])
        if isinstance(found, Exception):
            yield Complaint(_key(override), _shown(override), _sentence(found))


def _try(lines: Sequence[str]) -> DictConfig | Exception:
    try:
        return compose("config", overrides=list(lines), return_hydra_config=True)
    except Exception as error:
        return error


def _add(complaints: list[Complaint], found: Iterable[Complaint]) -> bool:
    found = list(found)
    complaints += found
    return bool(found)


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _text(override: Override) -> str:
    return str(override.input_line)


def _shown(override: Override) -> object:
    if override.is_delete():
        return None
    try:
        return override.get_value_string()
    except Exception:
        return _text(override).partition("=")[2]


def _values(override: Override) -> list[Any]:
    """Returns the value of an override, or the first ones of a sweep."""
    if not override.is_sweep_override():
        return [_plain(override.value())]
    try:
        axes.bounded_count(override)  # a range that is shuffled is listed whole
        return [_plain(value) for value in islice(override.sweep_iterator(), LONGEST_SWEEP)]
    except Exception:  # a glob, an interval, a range of no steps: Hydra's own business
        return []


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    return value


def _of_choice(override: Override, loader: ConfigLoader) -> Iterator[Complaint]:
    group, text = _key(override), _text(override)
    if override.is_delete() or group.split("/")[0] == "hydra" or override.package is not None:
        return
    known = group in (*tree.GROUPS, *PRESETS)
    if override.is_add() and known:
        cure = f"leave out the +: {shell_word(text[1:])}"
        yield Complaint(group, _shown(override), "is chosen already", cure)
        return
    if not override.is_add() and not known:
        cure = f"put + before it: {shell_word('+' + text)}"
        yield Complaint(group, _shown(override), "is no group of a run at rest", cure)
        return
    options = _options(group, loader)
    for value in _values(override):
        if isinstance(value, dict):
            continue
        if value is None or (isinstance(value, list) and group != "callbacks"):
            optional = group in PRESETS
            cure = f"write {shell_word('~' + group)}" if optional else meant("", options)
            yield Complaint(group, value, "one option is needed", cure)
            continue
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options:
                yield Complaint(
                    group, choice, "no such option", chosen(group, str(choice), options)
                )


def _of_value(override: Override, config: DictConfig, loader: ConfigLoader) -> Iterator[Complaint]:
    key = _key(override)
    if key.split(".")[0].split("/")[0] == "hydra" or override.package is not None:
        return
    adds = override.is_add() or override.is_force_add()
    if not adds and not _exists(config, key):
        shown = _shown(override)
        cure = _meant_key(key, config, loader)
        if _is_open(key.rpartition(".")[0], config) and not cure.startswith("did you mean"):
            cure = f"to add an entry, put + before the key: {shell_word(f'+{key}={shown}')}"
        yield Complaint(key, shown, "no such key", cure)
        return
    if override.is_delete():
        if not key.startswith("callbacks."):
            cure = f"give it another value: {key}=VALUE"
            yield Complaint(key, None, "cannot be left out", cure)
        return
    default = _at(config, key)
    for value in _values(override):
        if isinstance(value, dict) and not adds and _is_open(key, config):
            cure = f"put + before the key: {shell_word(f'+{key}={_shown(override)}')}"
            yield Complaint(key, _shown(override), "would add entries", cure)
            continue
        try:
            with open_dict(config):
                OmegaConf.update(config, key, value, merge=True, force_add=adds)
        except Exception as error:
            yield _mistyped(key, value, default, _declared(key, config), error)


def _is_open(key: str, config: DictConfig) -> bool:
    """Returns whether entries of any name may be added under a key."""
    declared = typing.get_origin(_declared(key, config))
    return key.split(".")[0] == "callbacks" or declared is Mapping


def _exists(config: DictConfig, key: str) -> bool:
    *parents, leaf = key.split(".")
    node = _at(config, ".".join(parents)) if parents else config
    return isinstance(node, DictConfig) and leaf in node


def _at(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except Exception:
        return None


def _mistyped(key: str, value: object, held: object, hint: Any, error: Exception) -> Complaint:
    """Returns the complaint about a value that the key's declared type does not take."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind: Any = next((kind for kind in kinds if kind is not type(None)), None)
    cure = (
        f"the default is {typed(key, held)}"
        if isinstance(held, str | int | float) and held != ""
        else ""
    )
    if hint is None or (isinstance(value, str) and "${" in value):
        return Complaint(key, value, _sentence(error), cure)
    if value is None:
        return Complaint(key, value, "cannot be null", cure)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.name for member in kind]
        close = meant(str(value), names)
        reason = f"is none of {', '.join(names)}"
        return Complaint(key, value, reason, close if close.startswith("did") else cure)
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return Complaint(key, value, "is not a whole number", f"write {key}={int(value)}")
    if typing.get_origin(kind) is tuple:
        return Complaint(key, value, "is not a list", f"write {typed(key, [value])}")
    reason = {
        int: "is not a whole number",
        float: "is not a number",
        bool: "is neither true nor false",
        str: "is not a text",
    }.get(kind, _sentence(error))
    return Complaint(key, value, reason, cure)


def _declared(key: str, config: DictConfig) -> Any:
    """Returns the type that a spec declares for a key; None where none does."""
    group, _, field = key.partition(".")
    if not field:
        return None if group in tree.GROUPS else typing.get_type_hints(Run).get(group)
    cls = registry.targets().get(str(_at(config, f"{group}._target_")))
    return typing.get_type_hints(cls).get(field) if cls is not None else None


def _meant_key(key: str, config: DictConfig, loader: ConfigLoader) -> str:
    *parents, leaf = key.split(".")
    node = _at(config, ".".join(parents)) if parents else config
    if not isinstance(node, DictConfig):
        return _meant_key(".".join(parents), config, loader) if len(parents) else ""
    if leaf in node:
        return f"{key} holds no further keys"
    group = ".".join(parents)
    schemas = [
        name
        for name, cls in registry.OPTIONS.get(group, {}).items()
        if leaf in (entry.name for entry in dataclasses.fields(cls))
    ]
    if others := sorted(name for schema in schemas for name in tree.names(group, schema)):
        return f"it is a key of {group}={', '.join(others)}"
    names = [str(name) for name in node if name not in ("_target_", "hydra")]
    if not parents:
        names += PRESETS
    return meant(leaf, names, ".".join([*parents, ""]))


def _sentence(error: Exception) -> str:
    """Returns the first sentence of an error that is not ours."""
    if isinstance(error, RecursionError):
        return "is nested too deep"
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(COMPOSING):
        return f"{lines[0].partition(':')[0]}: {lines[1].strip()}"
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
