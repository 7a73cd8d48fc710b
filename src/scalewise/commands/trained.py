"""What ``export`` and ``evaluate`` are given: the folder of a run, and words of ``key=value``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import inputs
from scalewise.config.parse import parse_group, parse_value
from scalewise.config.suggestions import did_you_mean
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.objectives import UserModule
from scalewise.run_config import config_issues

if TYPE_CHECKING:
    from scalewise.checkpoints.trained import TrainedRun


def read_arguments(
    command: str, arguments: Sequence[str], defaults: Mapping[str, str], issues: list[ConfigIssue]
) -> tuple[Path, dict[str, str]]:
    """Returns a run's folder and the options; raises ``ConfigError`` with all that is wrong.

    ``issues`` holds what the caller has found already, by ``options``.
    """
    folders = [word for word in arguments if "=" not in word or os.path.isdir(word)]
    issues = [
        *(
            ConfigIssue(key, value, "no such key", did_you_mean(key, list(defaults)))
            for key, value in parse_options(arguments).items()
            if key not in (*defaults, *inputs.READERS)
        ),
        *issues,
    ]
    if len(folders) != 1:
        reason = f"one run at a time, not {len(folders)}" if folders else "no folder given"
        issues.append(ConfigIssue("", "", reason, f"scalewise {command} runs/NAME/TIMESTAMP"))
    if issues:
        raise ConfigError(issues)
    return Path(folders[0]).expanduser().absolute(), {**defaults, **parse_options(arguments)}


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Returns what was typed as ``key=value``."""
    words = (word for word in arguments if "=" in word and not os.path.isdir(word))
    return dict(word.split("=", 1) for word in words)


def load_trained(
    folder: Path,
    step: str = "last",
    options: Mapping[str, str] | None = None,
    *,
    untrained: bool = False,
    needs_data: bool = False,
) -> TrainedRun:
    """Returns a checkpoint of a run with its specs; raises ``ConfigError`` where there is none.

    ``options``: options, among them paths of the run's inputs where they have moved. ``untrained``:
    whether step 0 is asked for, of which no checkpoint is kept. ``needs_data``: whether the caller
    reads the data, which need not be there otherwise.
    """
    from scalewise.checkpoints import trained

    values = inputs.relocate_inputs(
        trained.read_resolved(folder), folder, _path_options(options or {})
    )
    try:
        parts = [parse_group(group, values[group]) for group in trained.CONFIG_GROUPS]
    except ConfigError as error:
        raise _record_error(folder, error.issues) from None
    if any(isinstance(spec, UserModule) for spec in parts):
        reason, fix = "is of a module of yours", "load its checkpoint in code of your own"
        raise ConfigError.for_key("", "", f"{folder} {reason}", fix)
    named = zip(trained.CONFIG_GROUPS, parts, strict=True)
    issues = [
        issue
        for group, spec in named
        if needs_data or group != "data"
        for issue in config_issues(group, spec)
    ]
    if issues:
        raise _record_error(folder, issues)
    told = trained.TrainedRun(folder, None, int(values["seed"]), *parts)
    if untrained:
        return told
    return replace(told, checkpoint=trained.choose_checkpoint(folder, step, told.tensor_folders))


def _record_error(folder: Path, issues: Iterable[ConfigIssue]) -> ConfigError:
    """Returns the error of values in ``resolved.yaml``, which names that file.

    Paths of inputs are left as they are: the file is whole where these have moved.
    """
    file = folder / "resolved.yaml"
    return ConfigError(
        issue
        if issue.key in inputs.READERS
        else ConfigIssue("", "", f"{file}: {issue}", "put a copy of it back")
        for issue in issues
    )


def _path_options(options: Mapping[str, str]) -> dict[str, object]:
    """Returns the options that are paths of inputs, with values as Hydra reads them."""
    found: dict[str, object] = {}
    for key in inputs.READERS:
        if key in options:
            value = parse_value(key, options[key], f"set {key}=FILE")
            several = key.endswith("paths")
            found[key] = [str(it) for it in _option_list(value)] if several else str(value)
    return found


def _option_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
