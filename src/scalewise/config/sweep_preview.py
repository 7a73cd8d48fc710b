"""What a line searches, without running it: its axes, its sweeper's options, what stays fixed."""

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

from scalewise.config import app, diagnostics, search_path, search_space
from scalewise.config.composition_cache import shared_composition_cache
from scalewise.config.flags import split_flags
from scalewise.config.hydra_context import hydra_session
from scalewise.config.parse import TRUSTED, parse_run
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hpo.space import Axis, ChoiceAxis, IntervalAxis, grid_size, job_count_issues
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class SearchPreview:
    """A line for many jobs, taken apart."""

    run: RunConfig
    """The run at rest: no axis of it is set."""
    name: str
    """The sweep's, as its folder would be called."""
    space: Sequence[Axis]
    fixed_overrides: Sequence[str]
    """What was typed and holds for every job; neither the sweep nor options of Hydra."""
    sweeper: Mapping[str, Any]
    """``hydra.sweeper``."""
    sweeper_name: str
    """The name of that sweeper."""


MAX_CHECKED = 200
"""Jobs of a grid that are validated one by one; of more, each value is checked by its type."""


def _check_values(
    space: Sequence[Axis],
    fixed_overrides: Sequence[str],
    overrides: Sequence[str],
    cli_overrides: Sequence[str],
) -> None:
    """Raises ``ConfigError`` for values with which a job could not run."""
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
    """Returns what ``scalewise train ARGUMENTS`` would search; raises ``ConfigError``."""
    flags = split_flags(arguments, ("config_dir", "multirun"))
    app.prepare()
    own = [Path(flags.config_dir).absolute()] if flags.config_dir else []
    search_path.mount_configs(*own)
    if unreadable := list(diagnostics.unparsable_overrides(flags.overrides)):
        raise ConfigError(unreadable)
    with shared_composition_cache(), hydra_session() as loader:
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(flags.overrides)
            typed = list(zip(parsed, flags.overrides, strict=True))
            single = [line for override, line in typed if not override.is_sweep_override()]
            swept = [line for override, line in typed if override.is_sweep_override()]
            config = hydra.compose("config", overrides=single, return_hydra_config=True)
            options = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
            sweeper = cast(dict[str, Any], options)
            lines = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
            own_lines = [
                line
                for override, line in typed
                if line in single
                and not override.is_hydra_override()
                and override.key_or_group != "sweep"
            ]
            space, fixed = search_space.read_axes([*lines, *own_lines, *swept], loader)
            if str(sweeper["_target_"]).endswith(".ScalewiseSweeper"):
                stepped = [a for a in space if isinstance(a, ChoiceAxis) or a.step is not None]
                if issues := list(job_count_issues("", "", grid_size(stepped))):
                    raise ConfigError(issues)
            run = parse_run(config, fixed, flags.overrides, check_machine=False)
            _check_values(space, single, fixed, flags.overrides)
            name = Path(config.hydra.sweep.dir).parent.name
            option = str(config.hydra.runtime.choices["hydra/sweeper"])
        except Exception as error:  # Hydra's own, and whatever odd text makes it trip over
            raise diagnostics.translate_hydra_error(
                error, flags.overrides, check_machine=False
            ) from error
    flagged = ["-cd", str(own[0])] if own else []
    return SearchPreview(run, name, space, [*flagged, *fixed], sweeper, option)
