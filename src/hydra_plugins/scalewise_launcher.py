"""Hydra launcher plugins: ``hydra/launcher=scalewise``, ``packed`` and ``slurm``.

Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass

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
        options = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        assert isinstance(options, dict)
        return {str(key): value for key, value in options.items() if key not in LAUNCHER}


TARGET = f"{__name__}.{ScalewiseLauncher.__name__}"
LAUNCHER = {"_target_": TARGET, "_recursive_": False}
"""Instantiation keys of the launcher; a ``_target_`` in its options stays plain data."""


def _slurm() -> object:
    """Options of the Slurm executor: those of hydra-submitit-launcher without the task counts.

    Without that package the schema is empty and open: the executor reports the missing package.
    """
    try:
        from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
    except ImportError:
        return OmegaConf.create({**LAUNCHER, "engine": "slurm"}, flags={"struct": False})
    computed_names = ("tasks_per_node", "gpus_per_task", "cpus_per_gpu")
    defaults = {
        **LAUNCHER,
        "engine": "slurm",
        "name": "scalewise",
        "submitit_folder": "${hydra.sweep.dir}/slurm",
        "max_num_timeout": 3,
    }
    inherited_fields = [
        entry for entry in fields(SlurmQueueConf) if entry.name not in {*computed_names, *defaults}
    ]
    default_fields = [(name, type(value), value) for name, value in defaults.items()]
    return make_dataclass(
        "Slurm", [*((f.name, f.type, f) for f in inherited_fields), *default_fields]
    )


LAUNCHERS: dict[str, Callable[[], object]] = {
    "scalewise": lambda: {**LAUNCHER, "engine": "in_turn"},
    "packed": lambda: {**LAUNCHER, "engine": "packed", "slots": None},
    "slurm": _slurm,
}
"""Factory of the default options, by name of ``hydra/launcher``."""
