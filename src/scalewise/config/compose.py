"""Composition of a run from Hydra overrides in Python."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import hydra

from scalewise.config import app, diagnostics, paths
from scalewise.config.hydra_policy import hydra_session
from scalewise.config.parse import compose_unresolved, parse_run
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope


def compose(overrides: Iterable[str] = (), *, check_machine: bool = True) -> RunConfig:
    """Compose and validate the run of ``scalewise train OVERRIDES``.

    Args:
        overrides: Hydra overrides: ``["model=llama_160m", "optimizer.lr=1e-3"]``.
        check_machine: Whether the run is also validated against this machine; False for the plan
            of a run on other devices.

    Raises:
        ConfigError: The configuration is rejected; the error contains every config issue.
    """
    override_list = [overrides] if isinstance(overrides, str) else list(overrides)
    app.prepare()
    if syntax_issues := list(diagnostics.unparsable_overrides(override_list)):
        raise ConfigError(syntax_issues)
    with hydra_session():
        try:
            config = hydra.compose("config", overrides=override_list, return_hydra_config=True)
        except ConfigError:  # raised by the policy of the hydra node
            raise
        except Exception as error:  # Hydra raises many types for malformed overrides
            raise diagnostics.translate_hydra_error(
                error, override_list, check_machine=check_machine
            ) from error
        return parse_run(config, override_list, override_list, check_machine=check_machine)


@cache
def _compose_unresolved(*overrides: str) -> RunConfig:
    """Compose a run without resolving or validating it."""
    app.prepare()
    with hydra_session():
        config = hydra.compose("config", overrides=[*overrides], return_hydra_config=True)
        return compose_unresolved(config, overrides, [])


@cache
def _option_defaults(choices: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """Default values of these options, by dotted key.

    Each option is composed by itself, because no option file sets keys of another group.
    """
    default_run = _compose_unresolved()
    parts = {
        group: getattr(_compose_unresolved(f"{group}={choice}"), group)
        for group, choice in choices
        if choice != default_run.choices.get(group)
    }
    return flatten(replace(default_run, **parts).resolve().as_dict())


@cache
def _option_names(group: str) -> frozenset[str]:
    """Options of a group that scalewise defines."""
    return frozenset(paths.option_names(group))


def changed_from_defaults(run: RunConfig) -> list[dict[str, object]]:
    """Differences of a run from the defaults, each with ``key``, ``default`` and ``value``.

    First the chosen options, then the fields that differ from the defaults of these options.
    """
    default_choices = _compose_unresolved().choices
    chosen = {group: run.choices[group] for group in paths.CLOSED_GROUPS if group in run.choices}
    builtin = {group: name for group, name in chosen.items() if name in _option_names(group)}
    user_prefixes = tuple(f"{group}." for group in chosen if group not in builtin)
    changes: list[dict[str, object]] = [
        {"key": group, "default": default_choices.get(group), "value": choice}
        for group, choice in chosen.items()
        if choice != default_choices.get(group)
    ]
    defaults = _option_defaults(tuple(builtin.items()))
    current = flatten(run.as_dict())
    skipped = ("choices.", "overrides", "name", "hardware.", *user_prefixes)
    if run.compile.scope is CompileScope.auto:  # its value depends on other options
        skipped += ("compile.scope",)
    changes += [
        {"key": key, "default": defaults.get(key), "value": value}
        for key, value in current.items()
        if value != defaults.get(key) and not key.startswith(skipped) and key != "callbacks"
    ]
    dropped = {".".join(key.split(".")[:2]) for key in defaults if key.startswith("callbacks.")}
    return changes + [
        {"key": key, "default": "on", "value": "off"}
        for key in sorted(dropped)
        if key.split(".")[1] not in run.callbacks
    ]


def flatten(nested: object, prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings into one with dotted keys; sequences stay values."""
    if not isinstance(nested, dict) or (not nested and prefix):
        return {prefix: nested}
    flat: dict[str, object] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def group_choices(groups: Sequence[str] = paths.GROUPS) -> dict[str, list[str]]:
    """Options by config group."""
    return {group: paths.option_names(group) for group in groups}
