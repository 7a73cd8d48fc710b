"""Says what is wrong with a command line: every complaint at once, each with a cure.

Hydra stops at its first error, so a refused line is looked at again, override by override.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from scalewise.config import tree
from scalewise.config.own import own_hydra
from scalewise.config.read import read
from scalewise.errors import Complaint, ConfigError, ScalewiseError


def translated(error: Exception, arguments: Sequence[str]) -> Exception:
    """Returns the error to show for one that came out of Hydra; ours pass through, completed."""
    if isinstance(error, ScalewiseError) and not isinstance(error, ConfigError):
        return error
    if isinstance(error, ConfigError | HydraException | OmegaConfBaseException | ValueError):
        flags = get_args_parser().parse_args(list(arguments))
        found = diagnose(flags.overrides, flags.config_dir)
        known = error.complaints if isinstance(error, ConfigError) else ()
        together = {str(complaint): complaint for complaint in (*found, *known)}
        if together:
            return ConfigError(together.values())
        return ConfigError.one("", "", " ".join(str(error).split()))
    return error


def diagnose(overrides: Iterable[str], config_dir: str | None = None) -> list[Complaint]:
    """Returns what is wrong with these overrides, one complaint each, then across groups."""
    complaints: list[Complaint] = []
    with own_hydra() as loader:
        if config_dir is not None:
            loader.get_search_path().prepend("command-line", f"file://{config_dir}")
        parsed = list(_parsed(overrides, complaints))
        groups = [o for o in parsed if loader.get_group_options(_group(o))]
        sound = [o for o in groups if not _add(complaints, _of_choice(o, loader))]
        config = _composed([o for o in sound if not o.is_sweep_override()])
        if config is None:
            return complaints
        for override in parsed:
            if override not in groups:
                _add(complaints, _of_value(override, config, loader))
        try:
            read(config, ())
        except ConfigError as error:
            complaints += error.complaints
    return complaints


def _parsed(overrides: Iterable[str], complaints: list[Complaint]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
            if not _group(override):
                raise OverrideParseException(text, "no key")
            yield override
        except HydraException:
            cure = "write it as group=option or group.key=value, quoted where it has blanks"
            complaints.append(Complaint("", "", f"cannot read the override {text!r}", cure))


def _composed(groups: Sequence[Override]) -> DictConfig | None:
    lines = [o.input_line for o in groups if o.input_line is not None]
    for kept in (lines, []):
        try:
            return compose("config", overrides=kept, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException):
            continue
    return None


def _add(complaints: list[Complaint], found: Iterable[Complaint]) -> bool:
    found = list(found)
    complaints += found
    return bool(found)


def _group(override: Override) -> str:
    return str(override.key_or_group)


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator())
    return [override.value()]


def _of_choice(override: Override, loader: ConfigLoader) -> Iterator[Complaint]:
    group = _group(override)
    options = loader.get_group_options(group)
    options += [name for name in tree.names(group) if "/" in name]
    for value in _values(override):
        for choice in value if isinstance(value, list) else [value]:
            plain = str(choice).strip("'\"")
            if choice is not None and plain not in options:
                yield Complaint(group, plain, "no such option", _meant(plain, options))


def _of_value(
    override: Override, config: DictConfig, loader: ConfigLoader
) -> Iterator[Complaint]:
    key = _group(override)
    if override.is_delete() or key.split(".")[0] == "hydra":
        return
    if not (override.is_add() or override.is_force_add()) and not _exists(config, key):
        shown = override.get_value_string()
        cure = _meant_key(key, config, loader)
        if key.startswith("callbacks."):
            cure = f"to add a callback, put + before the key: +{key}={shown}"
        yield Complaint(key, shown, "no such key", cure)
        return
    for value in _values(override):
        try:
            with open_dict(config):
                OmegaConf.update(config, key, _plain(value), merge=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            yield Complaint(key, value, _first_sentence(error), _expected(config, key))


def _plain(value: Any) -> Any:
    return value.text if hasattr(value, "text") else value


def _exists(config: DictConfig, key: str) -> bool:
    *parents, leaf = key.split(".")
    node = OmegaConf.select(config, ".".join(parents)) if parents else config
    return isinstance(node, DictConfig) and leaf in node


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].strip().rstrip(".")


def _expected(config: DictConfig, key: str) -> str:
    held = OmegaConf.select(config, key)
    return f"it is {held} by default" if held is not None else ""


def _meant_key(key: str, config: DictConfig, loader: ConfigLoader) -> str:
    *parents, leaf = key.split(".")
    node = OmegaConf.select(config, ".".join(parents)) if parents else config
    if not isinstance(node, DictConfig):
        return _meant_key(".".join(parents), config, loader) if len(parents) else ""
    names = [str(name) for name in node if name not in ("_target_", "hydra")]
    if not parents:
        names += ["experiment", "sweep"]
    prefix = ".".join([*parents, ""])
    return _meant(leaf, names, prefix)


def _meant(text: str, options: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(text, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "there is " + ", ".join(f"{prefix}{name}" for name in sorted(options))
