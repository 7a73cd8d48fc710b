"""Hydra launcher plugins: ``hydra/launcher=scalewise``, ``packed`` and ``slurm``.

Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class ScalewiseLauncher(Launcher):
    """Launcher that validates every job of a batch before it starts the first."""

    def __init__(self, **options: object) -> None:
        """Ignores the options: ``options`` reads them once the sweep folder is known."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the config and the config loader."""
        from scalewise.config import app

        app.current_sweep_folder(config)
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs; the return value of each is the objective, to be minimized."""
        from scalewise.config import app

        return app.launch(self.loader, self.config, job_overrides, initial_job_idx, self.options)

    def options(self) -> dict[str, object]:
        """Launcher options of the config, without Hydra's ``_target_`` and ``_recursive_``."""
        from scalewise.config.launchers import LAUNCHER

        options = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        assert isinstance(options, dict)
        return {str(key): value for key, value in options.items() if key not in LAUNCHER}
