"""Composition from Python: overrides in, a Run out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import hydra

from scalewise.config import door, refuse, tree
from scalewise.config.own import own_hydra
from scalewise.config.read import read, unsettled
from scalewise.errors import ConfigError
from scalewise.run import Run


def compose(overrides: Iterable[str] = (), *, here: bool = True) -> Run:
    """Returns the Run that ``scalewise VERB OVERRIDES`` would run.

    ``overrides`` are Hydra overrides: ``["model=llama_160m", "optimizer.lr=1e-3"]``. With
    ``here=False`` the run may need devices that this machine lacks. Raises ``ConfigError`` with
    every complaint.
    """
    lines = [overrides] if isinstance(overrides, str) else list(overrides)
    door.prepare()
    if unreadable := list(refuse.unreadable(lines)):
        raise ConfigError(unreadable)
    with own_hydra():
        try:
            config = hydra.compose("config", overrides=lines, return_hydra_config=True)
        except ConfigError:  # the check of the hydra node
            raise
        except Exception as error:  # Hydra's own, and whatever odd text makes it trip over
            raise refuse.translated(error, lines, here=here) from error
        return read(config, lines, lines, here=here)


@cache
def _composed(*lines: str) -> Run:
    """Returns the unsettled run of these overrides, before it is asked what is wrong."""
    door.prepare()
    with own_hydra():
        config = hydra.compose("config", overrides=[*lines], return_hydra_config=True)
        return unsettled(config, lines, [])


@cache
def _at_rest(choices: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """Returns the values of these options as their files give them, flat.

    Each option is composed once: no file of ours sets what belongs to another group.
    """
    usual = _composed()
    parts = {
        group: getattr(_composed(f"{group}={choice}"), group)
        for group, choice in choices
        if choice != usual.choices.get(group)
    }
    return flat(replace(usual, **parts).settled().as_dict())


@cache
def _names(group: str) -> frozenset[str]:
    """Returns the suite's own options of a group."""
    return frozenset(tree.names(group))


def changed(run: Run) -> list[dict[str, object]]:
    """Returns where a run differs from the defaults: ``key``, ``default``, ``value``.

    First the options chosen, then the fields that differ from what those options give.
    """
    usual = _composed().choices
    chosen = {group: run.choices[group] for group in tree.CLOSED if group in run.choices}
    ours = {group: name for group, name in chosen.items() if name in _names(group)}
    strange = tuple(f"{group}." for group in chosen if group not in ours)  # of a user's folder
    rows: list[dict[str, object]] = [
        {"key": group, "default": usual.get(group), "value": choice}
        for group, choice in chosen.items()
        if choice != usual.get(group)
    ]
    before = _at_rest(tuple(ours.items()))
    after = flat(run.as_dict())
    skipped = ("choices.", "overrides", "name", "hardware.", *strange)
    rows += [
        {"key": key, "default": before.get(key), "value": value}
        for key, value in after.items()
        if value != before.get(key) and not key.startswith(skipped) and key != "callbacks"
    ]
    dropped = {".".join(key.split(".")[:2]) for key in before if key.startswith("callbacks.")}
    return rows + [
        {"key": key, "default": "on", "value": "off"}
        for key in sorted(dropped)
        if key.split(".")[1] not in run.callbacks
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
