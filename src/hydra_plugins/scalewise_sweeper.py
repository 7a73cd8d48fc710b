"""Hydra's way to a sweep: ``hydra/sweeper=basic`` crosses ``params`` and pairs ``zip``.

It takes the place of Hydra's own of that name, so that a sweep's file may choose another.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ScalewiseSweeper(Sweeper):
    """Every combination of ``params`` with every row of ``zip``, as one batch.

    Both map keys to values in Hydra's syntax of sweeps: ``a,b,c``, ``range(1,9)``, ``choice(..)``.
    """

    def __init__(self, params: Mapping[str, object], zip: Mapping[str, object]) -> None:
        self.params, self.zipped_params = params, zip

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Makes the launcher that the jobs go to."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Returns the result of every job. ``arguments`` replace an axis of the same key."""
        from scalewise.config import app, sweep_grid

        filed = sweep_grid.sweep_overrides(self.params, self.zipped_params)
        app.remember_sweep_axes(filed)
        batch: Any = sweep_grid.expand_jobs(filed, arguments, list(self.zipped_params), self.loader)
        assert self.launcher is not None
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
