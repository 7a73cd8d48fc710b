"""Hydra's way to a launcher: ``hydra/launcher=scalewise`` hands a batch of jobs to the suite.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ScalewiseLauncher(Launcher):
    """Validates every job of a batch before the first starts; its options name an engine."""

    def __init__(self, **options: object) -> None:
        self.options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps what ``launch`` composes with."""
        from scalewise.config import door

        door.sweep_folder(config)
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Returns one result per job; its value is the number that a sweeper minimises."""
        from scalewise.config import door

        return door.launch(self.loader, self.config, job_overrides, initial_job_idx, self.options)


LAUNCHERS: dict[str, dict[str, object]] = {
    "scalewise": {"engine": "in_turn"},
    "packed": {"engine": "packed", "slots": None},
}
"""Names of ``hydra/launcher``, with the engine of each and its options."""

for name, options in LAUNCHERS.items():
    ConfigStore.instance().store(
        group="hydra/launcher",
        name=name,
        node={"_target_": f"{__name__}.{ScalewiseLauncher.__name__}", **options},
        provider="scalewise",
    )
