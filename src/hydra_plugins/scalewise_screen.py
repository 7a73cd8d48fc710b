"""Hydra sweeper plugin for factorial screening: ``hydra/sweeper=screen``.

Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ScreenSweeper(Sweeper):
    """Sweeper that launches all jobs of a two-level fractional factorial as one batch."""

    launcher: Launcher

    def __init__(self, factors: Any, **options: Any) -> None:
        self.options = {"factors": factors or {}, **options}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Create the launcher and store the config loader."""
        from hydra.core.plugins import Plugins

        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the screening. Raises ``ConfigError`` for invalid factors."""
        from scalewise.config import parsed_overrides
        from scalewise.errors import ConfigError, ConfigIssue
        from scalewise.hpo.screen import ScreeningDesign

        axes, fixed_overrides = parsed_overrides.read_axes(arguments, self.loader)
        design = ScreeningDesign(**self.options)
        fix = "add it to hydra.sweeper.factors, or give it one value"
        issues = [
            ConfigIssue(axis.key, "", "is varied, and is not a factor of the screening", fix)
            for axis in axes
        ]
        issues += design.validate([override.split("=", 1)[0] for override in fixed_overrides])
        if issues:
            raise ConfigError(issues)
        self.launcher.launch(
            [[*fixed_overrides, *overrides] for overrides in design.build_overrides()], 0
        )


@dataclass
class ScreenSweeperConf:
    """Options of the sweeper, documented in ``scalewise.hpo.screen.ScreeningDesign``."""

    _target_: str = f"{__name__}.{ScreenSweeper.__name__}"
    _recursive_: bool = False
    factors: Any = None
    interactions: bool = False
    repeats: int = 2
    seed: int = 1


ConfigStore.instance().store(
    group="hydra/sweeper", name="screen", node=ScreenSweeperConf, provider="scalewise"
)
