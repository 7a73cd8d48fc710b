"""Preview of a sweep or search without running it: axes, fixed overrides, sweeper options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scalewise.config import app, diagnostics, parsed_overrides, paths
from scalewise.config.composition_cache import shared_composition_cache
from scalewise.config.flags import split_flags
from scalewise.config.hydra_policy import hydra_session
from scalewise.config.parse import TRUSTED, parse_run
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis, grid_size, job_count_issues
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class SearchPreview:
    """Parts of a sweep command line."""

    run: RunConfig
    """Run with the defaults of all axes."""
    name: str
    """Name of the sweep and of its folder."""
    space: Sequence[Axis]
    """Axes of the sweep."""
    fixed_overrides: Sequence[str]
    """Overrides of every job, without ``sweep=`` and options of Hydra."""
    sweeper: Mapping[str, Any]
    """Options in ``hydra.sweeper``."""
    sweeper_name: str
    """Option of ``hydra/sweeper``."""


MAX_CHECKED = 200
"""Maximum number of jobs that are validated; in larger grids only value types are checked."""


def _check_values(
    space: Sequence[Axis],
    fixed_overrides: Sequence[str],
    overrides: Sequence[str],
    cli_overrides: Sequence[str],
) -> None:
    """Raise ``ConfigError`` if a value of an axis is rejected."""
    grid = [
        [f"{axis.key}={v}" for v in axis.values] for axis in space if isinstance(axis, ChoiceAxis)
    ]
    intervals = [axis for axis in space if isinstance(axis, IntervalAxis)]
    validated = not intervals and prod(map(len, grid)) <= MAX_CHECKED
    jobs = [*product(*grid)] if validated else [(line,) for values in grid for line in values]
    jobs += [(f"{axis.key}={end}",) for axis in intervals for end in (axis.low, axis.high)]
    issues: dict[str, ConfigIssue] = {}
    for job in jobs:
        config = hydra.compose(
            "config", overrides=[*fixed_overrides, *job], return_hydra_config=True
        )
        try:
            if validated or TRUSTED in job[0].partition("=")[0]:
                parse_run(config, [*overrides, *job], cli_overrides, check_machine=False)
        except ConfigError as error:
            issues |= {str(issue): issue for issue in error.issues}
    if issues:
        raise ConfigError(issues.values())


def preview_search(arguments: Sequence[str]) -> SearchPreview:
    """Parse the sweep of ``scalewise train ARGUMENTS``; raises ``ConfigError``."""
    flags = split_flags(arguments, ("config_dir", "multirun"))
    app.prepare()
    user_folders = [Path(flags.config_dir).absolute()] if flags.config_dir else []
    paths.mount_configs(*user_folders)
    if syntax_issues := list(diagnostics.unparsable_overrides(flags.overrides)):
        raise ConfigError(syntax_issues)
    with shared_composition_cache(), hydra_session() as loader:
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(flags.overrides)
            pairs = list(zip(parsed, flags.overrides, strict=True))
            single_overrides = [
                line for override, line in pairs if not override.is_sweep_override()
            ]
            sweep_overrides = [line for override, line in pairs if override.is_sweep_override()]
            config = hydra.compose("config", overrides=single_overrides, return_hydra_config=True)
            options = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
            sweeper = cast(dict[str, Any], options)
            file_overrides = [
                f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()
            ]
            fixed_overrides = [
                line
                for override, line in pairs
                if line in single_overrides
                and not override.is_hydra_override()
                and override.key_or_group != "sweep"
            ]
            space, fixed = parsed_overrides.read_axes(
                [*file_overrides, *fixed_overrides, *sweep_overrides], loader
            )
            if str(sweeper["_target_"]).endswith(".ScalewiseSweeper"):
                discrete = [a for a in space if isinstance(a, ChoiceAxis) or a.step is not None]
                if issues := list(job_count_issues("", "", grid_size(discrete))):
                    raise ConfigError(issues)
            run = parse_run(config, fixed, flags.overrides, check_machine=False)
            _check_values(space, single_overrides, fixed, flags.overrides)
            name = Path(config.hydra.sweep.dir).parent.name
            option = str(config.hydra.runtime.choices["hydra/sweeper"])
        except Exception as error:  # Hydra raises many types for malformed overrides
            raise diagnostics.translate_hydra_error(
                error, flags.overrides, check_machine=False
            ) from error
    flags_of_folder = ["-cd", str(user_folders[0])] if user_folders else []
    return SearchPreview(run, name, space, [*flags_of_folder, *fixed], sweeper, option)
