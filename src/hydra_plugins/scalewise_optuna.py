"""Hydra sweeper plugin for hyperparameter search: ``hydra/sweeper=optuna``.

Hydra imports this module in every application, so the search is imported when it runs.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Sweeper that launches batches of trials until the study has all its trials."""

    config: DictConfig
    launcher: Launcher

    def __init__(self, params: dict[str, str], **options: Any) -> None:
        self.params, self.options = dict(params), options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Create the launcher and store the config and the config loader."""
        from scalewise.config import app

        app.mark_search()  # before the launcher chooses the sweep folder
        self.loader, self.config = hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the search. Raises ``ConfigError`` for invalid options before any job runs."""
        from scalewise.commands.search import TrialRunner

        axes = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        TrialRunner(self.loader, self.config, self.launcher).run(axes, self.options)


@dataclass
class OptunaSweeperConf:
    """Options of the sweeper, documented in ``scalewise.hpo.config.SearchConfig``."""

    _target_: str = f"{__name__}.{OptunaSweeper.__name__}"
    _recursive_: bool = False
    params: dict[str, str] = field(default_factory=dict)
    trials: int | None = None
    jobs: int = 1
    sampler: str = "tpe"
    seed: int = 1
    objectives: Any = None  # Any: Hydra rejects new keys in a Dict field
    constraints: Any = None
    pruner: str = "none"
    storage: str | None = None
    study: str | None = None


ConfigStore.instance().store(
    group="hydra/sweeper", name="optuna", node=OptunaSweeperConf, provider="scalewise"
)
