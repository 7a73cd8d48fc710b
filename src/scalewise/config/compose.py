"""Composition from Python: overrides in, a Run out."""

from collections.abc import Iterable, Sequence
from functools import cache

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from scalewise.config import door, refuse, tree
from scalewise.config.own import own_hydra
from scalewise.config.read import read
from scalewise.errors import ConfigError
from scalewise.run import Run


def compose(overrides: Iterable[str] = (), *, here: bool = True) -> Run:
    """Returns the Run that ``scalewise VERB OVERRIDES`` would run.

    ``overrides`` are Hydra overrides: ``["model=llama_160m", "optimizer.lr=1e-3"]``. With
    ``here=False`` the run may need devices that this machine lacks. Raises ``ConfigError`` with
    every complaint.
    """
    lines = list(overrides)
    door.prepare()
    try:
        with own_hydra():
            config = hydra.compose("config", overrides=lines, return_hydra_config=True)
        return read(config, lines, here=here)
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        raise refuse.translated(error, lines) from error


@cache
def defaults() -> dict[str, object]:
    """Returns the house at rest, flat: dotted key to value."""
    return flat(compose(here=False).as_dict())


def changed(run: Run) -> list[dict[str, object]]:
    """Returns where a run differs from the defaults: ``key``, ``default``, ``value``."""
    before, after = defaults(), flat(run.as_dict())
    internal = ("choices.", "overrides")
    keys = [key for key in after if before.get(key) != after[key]]
    return [
        {"key": key, "default": before.get(key), "value": after[key]}
        for key in keys
        if not key.startswith(internal) and not key.endswith("_target_") and key != "name"
    ]


def flat(nested: object, prefix: str = "") -> dict[str, object]:
    """Returns nested mappings as one, with dotted keys; sequences stay values."""
    if not isinstance(nested, dict) or (not nested and prefix):
        return {prefix: nested}
    joined: dict[str, object] = {}
    for key, value in nested.items():
        joined |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return joined


def choices(groups: Sequence[str] = tree.GROUPS) -> dict[str, list[str]]:
    """Returns the options of each group."""
    return {group: tree.names(group) for group in groups}
