"""Arguments of ``export`` and ``evaluate`` (run folder, ``key=value``) and run loading."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise import inputs, regular_files
from scalewise.config.parse import parse_group, parse_value
from scalewise.errors import ConfigError, ConfigIssue, did_you_mean
from scalewise.objectives import UserModule
from scalewise.validation.run_issues import config_issues

if TYPE_CHECKING:
    from scalewise.checkpoints.trained_run import TrainedRun


def read_arguments(
    command: str, arguments: Sequence[str], defaults: Mapping[str, str], issues: list[ConfigIssue]
) -> tuple[Path, dict[str, str]]:
    """Parse the run folder and the options of a command.

    Args:
        command: Name of the subcommand, for the usage message.
        arguments: Arguments of the command line.
        defaults: Default of each option.
        issues: Issues that the caller has found in the options.

    Raises:
        ConfigError: The arguments are rejected; the error also contains ``issues``.
    """
    folders = [argument for argument in arguments if "=" not in argument or os.path.isdir(argument)]
    issues = [
        *(
            ConfigIssue(key, value, "no such key", did_you_mean(key, list(defaults)))
            for key, value in parse_options(arguments).items()
            if key not in (*defaults, *inputs.DIGEST_FUNCTIONS)
        ),
        *issues,
    ]
    if len(folders) != 1:
        reason = f"requires one run folder, not {len(folders)}" if folders else "no folder given"
        issues.append(ConfigIssue("", "", reason, f"scalewise {command} runs/NAME/TIMESTAMP"))
    if issues:
        raise ConfigError(issues)
    folder = regular_files.expand_home(folders[0]).absolute()
    return folder, {**defaults, **parse_options(arguments)}


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Parse the ``key=value`` arguments."""
    pairs = (argument for argument in arguments if "=" in argument and not os.path.isdir(argument))
    return dict(argument.split("=", 1) for argument in pairs)


def load_trained(
    folder: Path,
    step: str = "last",
    options: Mapping[str, str] | None = None,
    *,
    untrained: bool = False,
    needs_data: bool = False,
) -> TrainedRun:
    """Load the configuration of a run and choose a checkpoint.

    Args:
        folder: Run folder.
        step: ``last``, ``best`` or a step number.
        options: Options of the command; paths of moved input files among them are used.
        untrained: Whether to use the initial model of step 0, which has no checkpoint.
        needs_data: Whether the data must be available.

    Raises:
        ConfigError: The run or the checkpoint cannot be loaded.
    """
    from scalewise.checkpoints import trained_run

    values = inputs.relocate_inputs(
        trained_run.read_resolved(folder), folder, _path_options(options or {})
    )
    try:
        configs = [parse_group(group, values[group]) for group in trained_run.CONFIG_GROUPS]
    except ConfigError as error:
        raise _record_error(folder, error.issues) from None
    if any(isinstance(spec, UserModule) for spec in configs):
        reason = "is a run of a user-defined module"
        fix = "load its checkpoint in your own code"
        raise ConfigError.for_key("", "", f"{folder} {reason}", fix)
    configs_by_group = zip(trained_run.CONFIG_GROUPS, configs, strict=True)
    issues = [
        issue
        for group, spec in configs_by_group
        if needs_data or group != "data"
        for issue in config_issues(group, spec)
    ]
    if issues:
        raise _record_error(folder, issues)
    run = trained_run.TrainedRun(folder, None, int(values["seed"]), *configs)
    if untrained:
        return run
    checkpoint, lock = trained_run.choose_checkpoint(folder, step, run.tensor_folders)
    return replace(run, checkpoint=checkpoint, lock=lock)


def _record_error(folder: Path, issues: Iterable[ConfigIssue]) -> ConfigError:
    """Build an error that names ``resolved.yaml``, except for issues of input paths."""
    file = folder / "resolved.yaml"
    return ConfigError(
        issue
        if issue.key in inputs.DIGEST_FUNCTIONS
        else ConfigIssue("", "", f"{file}: {issue}", "restore it from a copy")
        for issue in issues
    )


def _path_options(options: Mapping[str, str]) -> dict[str, object]:
    """Options that are input paths, with values parsed by Hydra."""
    paths: dict[str, object] = {}
    for key in inputs.DIGEST_FUNCTIONS:
        if key in options:
            value = parse_value(key, options[key], f"set {key}=FILE")
            is_list = key.endswith("paths")
            paths[key] = [str(it) for it in _option_list(value)] if is_list else str(value)
    return paths


def _option_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
