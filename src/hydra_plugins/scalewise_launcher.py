"""Hydra's way to a launcher: ``hydra/launcher=scalewise`` hands a batch of jobs to the suite.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class ScalewiseLauncher(Launcher):
    """Validates every job of a batch before the first starts; its options name an engine."""

    def __init__(self, **options: object) -> None:
        """Ignores the options: some name the sweep's folder, which is resolved in ``launch``."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keeps what ``launch`` composes with."""
        from scalewise.config import app

        app.current_sweep_folder(config)
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Returns one result per job; its value is the number that a sweeper minimises."""
        from scalewise.config import app

        return app.launch(self.loader, self.config, job_overrides, initial_job_idx, self.options)

    def options(self) -> dict[str, object]:
        """Returns the options as they are now, without Hydra's ``_target_`` and ``_recursive_``."""
        options = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        assert isinstance(options, dict)
        return {str(key): value for key, value in options.items() if key not in LAUNCHER}


TARGET = f"{__name__}.{ScalewiseLauncher.__name__}"
LAUNCHER = {"_target_": TARGET, "_recursive_": False}
"""What Hydra constructs the launcher by; a ``_target_`` in its options stays plain data."""


def _slurm() -> object:
    """Returns the options of the Slurm engine: those of hydra-submitit-launcher, less its ranks.

    Without that package there are none, and whatever is given for one is refused in our words.
    """
    try:
        from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
    except ImportError:
        return OmegaConf.create({**LAUNCHER, "engine": "slurm"}, flags={"struct": False})
    derived = ("tasks_per_node", "gpus_per_task", "cpus_per_gpu")
    ours = {
        **LAUNCHER,
        "engine": "slurm",
        "name": "scalewise",
        "submitit_folder": "${hydra.sweep.dir}/slurm",
        "max_num_timeout": 3,
    }
    kept = [entry for entry in fields(SlurmQueueConf) if entry.name not in {*derived, *ours}]
    settings = [(name, type(value), value) for name, value in ours.items()]
    return make_dataclass("Slurm", [*((f.name, f.type, f) for f in kept), *settings])


LAUNCHERS: dict[str, Callable[[], object]] = {
    "scalewise": lambda: {**LAUNCHER, "engine": "in_turn"},
    "packed": lambda: {**LAUNCHER, "engine": "packed", "slots": None},
    "slurm": _slurm,
    "joblib": lambda: {**LAUNCHER, "engine": "joblib", "n_jobs": -1},
}
"""Names of ``hydra/launcher``, with what makes the engine of each and its options."""
