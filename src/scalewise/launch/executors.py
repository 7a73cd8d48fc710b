"""The engines of a sweep by name, as ``hydra/launcher=NAME`` asks for them."""

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
        raise ConfigError.for_key("hydra/launcher", "slurm", "needs hydra-submitit-launcher", fix)
    from scalewise.launch.slurm import SlurmExecutor

    return SlurmExecutor(**options)


def _joblib(n_jobs: int = -1) -> Executor:
    if find_spec("joblib") is None:
        fix = "pip install 'scalewise[joblib]', or choose hydra/launcher=packed"
        raise ConfigError.for_key("hydra/launcher", "joblib", "needs joblib", fix)
    from scalewise.launch.joblib_pool import JoblibExecutor

    return JoblibExecutor(n_jobs)


ENGINES: Mapping[str, Callable[..., Executor]] = {
    "in_turn": _sequential,
    "packed": _packed_executor,
    "slurm": _slurm,
    "joblib": _joblib,
}
"""What makes each engine from its options; it imports what that engine needs."""


ELSEWHERE = ("slurm",)
"""Engines whose jobs run on other machines than the present one."""


def build_executor(options: Mapping[str, Any]) -> Executor:
    """Returns the engine that the options of ``hydra/launcher`` name."""
    given = dict(options)
    return ENGINES[str(given.pop("engine"))](**given)
