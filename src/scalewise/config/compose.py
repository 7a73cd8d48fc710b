"""Composition from Python: overrides in, a Run out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import hydra

from scalewise.config import app, diagnostics, paths
from scalewise.config.hydra_context import hydra_session
from scalewise.config.parse import compose_unresolved, parse_run
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig


def compose(overrides: Iterable[str] = (), *, here: bool = True) -> RunConfig:
    """Returns the ``Run`` of a command line: ``scalewise train OVERRIDES``.

    ``overrides`` are Hydra overrides: ``["model=llama_160m", "optimizer.lr=1e-3"]``. With
    ``here=False`` the run may need devices that this machine lacks. Raises ``ConfigError`` with
    every config issue.
    """
    lines = [overrides] if isinstance(overrides, str) else list(overrides)
    app.prepare()
    if unreadable := list(diagnostics.unparsable_overrides(lines)):
        raise ConfigError(unreadable)
    with hydra_session():
        try:
            config = hydra.compose("config", overrides=lines, return_hydra_config=True)
        except ConfigError:  # the check of the hydra node
            raise
        except Exception as error:  # Hydra's own, and whatever odd text makes it trip over
            raise diagnostics.translate_hydra_error(error, lines, check_machine=here) from error
        return parse_run(config, lines, lines, check_machine=here)


@cache
def _compose_unresolved(*overrides: str) -> RunConfig:
    """Returns the unsettled run of these overrides, before it is asked what is wrong."""
    app.prepare()
    with hydra_session():
        config = hydra.compose("config", overrides=[*overrides], return_hydra_config=True)
        return compose_unresolved(config, overrides, [])


@cache
def _option_defaults(choices: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """Returns the values of these options as their files give them, flat.

    Each option is composed once: no file of ours sets what belongs to another group.
    """
    usual = _compose_unresolved()
    parts = {
        group: getattr(_compose_unresolved(f"{group}={choice}"), group)
        for group, choice in choices
        if choice != usual.choices.get(group)
    }
    return flatten(replace(usual, **parts).resolve().as_dict())


@cache
def _option_names(group: str) -> frozenset[str]:
    """Returns the suite's own options of a group."""
    return frozenset(paths.option_names(group))


def changed_from_defaults(run: RunConfig) -> list[dict[str, object]]:
    """Returns where a run differs from the defaults: ``key``, ``default``, ``value``.

    First the options chosen, then the fields that differ from what those options give.
    """
    usual = _compose_unresolved().choices
    chosen = {group: run.choices[group] for group in paths.CLOSED_GROUPS if group in run.choices}
    ours = {group: name for group, name in chosen.items() if name in _option_names(group)}
    strange = tuple(f"{group}." for group in chosen if group not in ours)  # of a user's folder
    rows: list[dict[str, object]] = [
        {"key": group, "default": usual.get(group), "value": choice}
        for group, choice in chosen.items()
        if choice != usual.get(group)
    ]
    before = _option_defaults(tuple(ours.items()))
    after = flatten(run.as_dict())
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


def flatten(nested: object, prefix: str = "") -> dict[str, object]:
    """Returns nested mappings as one, with dotted keys; sequences stay values."""
    if not isinstance(nested, dict) or (not nested and prefix):
        return {prefix: nested}
    joined: dict[str, object] = {}
    for key, value in nested.items():
        joined |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return joined


def group_choices(groups: Sequence[str] = paths.GROUPS) -> dict[str, list[str]]:
    """Returns the options of each group."""
    return {group: paths.option_names(group) for group in groups}
