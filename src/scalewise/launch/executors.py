"""Executors by name, for ``hydra/launcher=NAME``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from scalewise.errors import ConfigError
from scalewise.launch.executor import Executor, SequentialExecutor


def _sequential() -> Executor:
    return SequentialExecutor()


def _packed_executor(slots: int | None = None) -> Executor:
    from scalewise.launch.packed_executor import PackedExecutor

    return PackedExecutor(slots)


def _slurm(**options: Any) -> Executor:
    if find_spec("submitit") is None:
        fix = "pip install 'scalewise[slurm]'"
        raise ConfigError.for_key(
            "hydra/launcher", "slurm", "requires hydra-submitit-launcher", fix
        )
    from scalewise.launch.slurm import SlurmExecutor

    return SlurmExecutor(**options)


EXECUTORS: Mapping[str, Callable[..., Executor]] = {
    "in_turn": _sequential,
    "packed": _packed_executor,
    "slurm": _slurm,
}
"""Constructors of the executors by the ``engine`` option; each imports its own dependencies."""

REMOTE_LAUNCHERS = ("slurm",)
"""Executors that run jobs on other machines."""


def build_executor(options: Mapping[str, Any]) -> Executor:
    """Executor for the options of ``hydra/launcher``."""
    arguments = dict(options)
    return EXECUTORS[str(arguments.pop("engine"))](**arguments)
