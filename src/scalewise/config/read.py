"""From a composed DictConfig to a Run: past this file nobody sees OmegaConf."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalewise.config import registry, tree
from scalewise.errors import Complaint, ConfigError
from scalewise.run import Run


def read(config: DictConfig, overrides: Iterable[str], *, here: bool = True) -> Run:
    """Returns the settled Run of a composed config that still holds its ``hydra`` node.

    Raises ``ConfigError`` with every complaint; those about the present machine only if ``here``.
    """
    choices = {
        group: str(choice)
        for group, choice in config.hydra.runtime.choices.items()
        if group in (*tree.GROUPS, "experiment", "sweep", "inject") and choice is not None
    }
    values = _values(config)
    complaints: list[Complaint] = []
    parts: dict[str, Any] = {}
    for group in tree.CLOSED:
        part = _part(group, values[group], complaints)
        if part is not None:
            parts[group] = part
    if complaints:
        raise ConfigError(complaints)
    run = Run(
        **parts,
        **{key: _as_declared(Run, key, values[key]) for key in _PLAIN},
        callbacks=values["callbacks"],
        choices=choices,
        overrides=tuple(overrides),
    ).settled()
    complaints += run.complaints()
    if here:
        complaints += run.machine_complaints()
    if complaints:
        raise ConfigError(complaints)
    return run


_PLAIN = ("name", "seed", "question", "resume", "trusted_packages")


def _values(config: DictConfig) -> dict[str, Any]:
    try:
        plain = config.copy()
        OmegaConf.set_struct(plain, False)
        plain.name = config.name  # resolved while the hydra node is still there
        plain.pop("hydra", None)
        missing = sorted(OmegaConf.missing_keys(plain))
        if missing:
            raise ConfigError(
                Complaint(key, "???", "must be given", f"add {key}=VALUE") for key in missing
            )
        values = OmegaConf.to_container(plain, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError.one("", "", str(error).splitlines()[0]) from error
    assert isinstance(values, dict)
    return typing.cast(dict[str, Any], values)


def _part(group: str, values: object, complaints: list[Complaint]) -> Any:
    given = values.get("_target_") if isinstance(values, Mapping) else None
    cls = registry.targets().get(str(given))
    if cls is None or cls not in registry.OPTIONS.get(group, {}).values():
        complaints.append(
            Complaint(
                f"{group}._target_" if given else group,
                given if given else values,
                f"is not a registered {group}",
                f"choose one of {group}={', '.join(tree.names(group))}",
            )
        )
        return None
    assert isinstance(values, Mapping)
    keys = [entry.name for entry in dataclasses.fields(cls)]
    return cls(**{key: _as_declared(cls, key, values[key]) for key in keys})


def _as_declared(cls: type, key: str, value: Any) -> Any:
    hint = typing.get_type_hints(cls)[key]
    return tuple(value) if typing.get_origin(hint) is tuple else value
