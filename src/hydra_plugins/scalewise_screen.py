"""Hydra's way to a screen: ``hydra/sweeper=screen`` runs a fraction of a two-level factorial.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ScreenSweeper(Sweeper):
    """Hands all jobs of the design to the launcher at once."""

    def __init__(self, factors: Any, **options: Any) -> None:
        self.options = {"factors": factors or {}, **options}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps what jobs are composed with."""
        from hydra.core.plugins import Plugins

        self.loader = hydra_context.config_loader
        self.batches = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Runs the screen; raises ``ConfigError`` for factors that cannot be had."""
        from scalewise.config import search_space
        from scalewise.errors import ConfigError, ConfigIssue
        from scalewise.hpo.screen import ScreeningDesign

        swept, fixed = search_space.read_axes(arguments, self.loader)
        screen = ScreeningDesign(**self.options)
        fix = "give it two values under hydra.sweeper.factors, or one here"
        issues = [
            ConfigIssue(axis.key, "", "a screen varies its factors alone", fix) for axis in swept
        ]
        issues += screen.validate([line.split("=", 1)[0] for line in fixed])
        if issues:
            raise ConfigError(issues)
        self.batches.launch([[*fixed, *line] for line in screen.build_overrides()], 0)


@dataclass
class ScreenSweeperConf:
    """Its options; ``scalewise.hpo.screen.ScreeningDesign`` says what they mean."""

    _target_: str = f"{__name__}.{ScreenSweeper.__name__}"
    _recursive_: bool = False
    factors: Any = None
    interactions: bool = False
    repeats: int = 2
    seed: int = 1


ConfigStore.instance().store(
    group="hydra/sweeper", name="screen", node=ScreenSweeperConf, provider="scalewise"
)
