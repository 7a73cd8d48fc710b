"""Hydra sweeper plugin for grids: ``hydra/sweeper=basic`` crosses ``params`` and pairs ``zip``.

It replaces Hydra's own ``basic`` sweeper, so that the file of a sweep may choose another one.
Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ScalewiseSweeper(Sweeper):
    """Sweeper that launches all combinations of ``params`` with the tuples of ``zip``.

    Both map keys to values in Hydra's sweep syntax: ``a,b,c``, ``range(1,9)``, ``choice(..)``.
    """

    config: DictConfig
    launcher: Launcher

    def __init__(self, params: Mapping[str, object], zip: Mapping[str, object]) -> None:
        self.params, self.zipped_params = params, zip

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Create the launcher and store the config and the config loader."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the sweep and return its results; ``arguments`` replace axes of the same key."""
        from scalewise.config import app, parsed_overrides

        file_overrides = parsed_overrides.sweep_overrides(self.params, self.zipped_params)
        app.set_file_overrides(file_overrides)
        batch: Any = parsed_overrides.expand_jobs(
            file_overrides, arguments, list(self.zipped_params), self.loader
        )
        return self.launcher.launch(batch, initial_job_idx=0)


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="basic",
    node={
        "_target_": f"{__name__}.{ScalewiseSweeper.__name__}",
        "_recursive_": False,
        "_convert_": "all",
        "params": {},
        "zip": {},
    },
    provider="scalewise",
)
