"""Launchers of sweeps: options of ``hydra/launcher``, and the check of its name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, make_dataclass

from omegaconf import OmegaConf

from scalewise.errors import ConfigIssue, suggested_option
from scalewise.typed_override import shell_word

LAUNCHER_TARGET = "hydra_plugins.scalewise_launcher.ScalewiseLauncher"
LAUNCHER = {"_target_": LAUNCHER_TARGET, "_recursive_": False}
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
REMOTE_LAUNCHERS = ("slurm",)
"""Launchers that run jobs on other machines."""


def launcher_issues(launcher: object) -> Iterator[ConfigIssue]:
    """Yield an issue for a launcher of another package, which skips validation and records."""
    if launcher not in LAUNCHERS:
        reason = "is not a launcher of scalewise: it neither validates nor records jobs"
        fix = suggested_option("hydra/launcher", str(launcher), LAUNCHERS, "hydra/launcher=")
        if fix.startswith("available"):
            fix = f"choose one of hydra/launcher={', '.join(LAUNCHERS)}"
        yield ConfigIssue("hydra/launcher", launcher, reason, fix)


def unknown_option_issues(launcher: str, options: Mapping[str, object]) -> Iterator[ConfigIssue]:
    """Yield an issue for each option of ``hydra.launcher`` that the launcher lacks.

    Files may set options of another launcher than the chosen one. Hydra checks those of ``slurm``.
    """
    defaults = LAUNCHERS[launcher]()
    names = defaults if isinstance(defaults, dict) else options
    for name, value in options.items():
        if name not in names:
            key = f"hydra.launcher.{name}"
            reason = f"is not an option of hydra/launcher={launcher}"
            yield ConfigIssue(key, value, reason, f"add {shell_word(f'~{key}')}")
