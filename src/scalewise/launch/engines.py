"""The engines of a sweep by name, as ``hydra/launcher=NAME`` asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from scalewise.errors import ConfigError
from scalewise.launch.engine import Engine, InTurn


def _in_turn() -> Engine:
    return InTurn()


def _packed(slots: int | None = None) -> Engine:
    from scalewise.launch.packed import Packed

    return Packed(slots)


def _slurm(**options: Any) -> Engine:
    if find_spec("submitit") is None:
        cure = "pip install 'scalewise[slurm]'"
        raise ConfigError.one("hydra/launcher", "slurm", "needs hydra-submitit-launcher", cure)
    from scalewise.launch.slurm import Slurm

    return Slurm(**options)


def _joblib(n_jobs: int = -1) -> Engine:
    if find_spec("joblib") is None:
        cure = "pip install 'scalewise[joblib]', or choose hydra/launcher=packed"
        raise ConfigError.one("hydra/launcher", "joblib", "needs joblib", cure)
    from scalewise.launch.joblib_pool import Joblib

    return Joblib(n_jobs)


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "in_turn": _in_turn,
    "packed": _packed,
    "slurm": _slurm,
    "joblib": _joblib,
}
"""What makes each engine from its options; it imports what that engine needs."""


ELSEWHERE = ("slurm",)
"""Engines whose jobs run on other machines than the present one."""


def named(options: Mapping[str, Any]) -> Engine:
    """Returns the engine that the options of ``hydra/launcher`` name."""
    given = dict(options)
    return ENGINES[str(given.pop("engine"))](**given)
