"""The suite's own callbacks as a config sees them: their arguments, checked without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_type_hints

from scalewise.config.near import meant
from scalewise.errors import Complaint
from scalewise.units import LARGEST

LOWEST = {
    "factor": 1.0,
    "patience": 1,
    "every": 1,
    "floor": 0,
    "wait": 0,
    "active": 1,
    "step": 0,
    "rank": 0,
}
"""Least value of each number; a ``factor`` must exceed its."""


class Arguments:
    """What a callback is made of; checked again where one is made in code."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for what the callback does not take."""
        for field, kind in get_type_hints(type(self)).items():
            if field in LOWEST and (reason := _wrong(field, getattr(self, field), kind)):
                raise ValueError(f"{field}={getattr(self, field)} {reason}")


@dataclass(eq=False)  # a callback is only itself
class Guarding(Arguments):
    """Arguments of ``guard.LossGuard``."""

    factor: float = 3.0
    """A leap is a loss above this times the running mean."""
    patience: int = 5
    """Leaps in a row that end the run."""
    every: int = 10
    """Losses looked at together."""
    floor: float = 0.1
    """A task with less loss is as good as solved: what rises that far is no leap."""


@dataclass(eq=False)
class Profiling(Arguments):
    """Arguments of ``profiler.Profiler``."""

    wait: int = 5
    """Micro batches that pass first."""
    active: int = 3
    """Micro batches that are recorded."""


@dataclass(eq=False)
class Happening(Arguments):
    """Arguments of the accidents in ``inject``."""

    step: int = 3
    """Steps done before it happens."""
    rank: int = 0
    """Where it happens."""
    once: bool = False
    """Not again when the job starts again in the same folder."""


_ROOM = "scalewise.training.callbacks"
OWN: dict[str, type] = {
    f"{_ROOM}.guard.LossGuard": Guarding,
    f"{_ROOM}.profiler.Profiler": Profiling,
    **dict.fromkeys(
        (f"{_ROOM}.inject.{name}" for name in ("Raise", "OutOfMemory", "Hang", "Kill")), Happening
    ),
}
"""Arguments of each callback by its ``_target_``."""


def is_own(path: object) -> bool:
    """Returns whether a ``_target_`` is of the suite."""
    return str(path).split(".")[0] == "scalewise"


def complaints(name: str, callback: Mapping[str, object]) -> Iterator[Complaint]:
    """Yields arguments of one of the suite's callbacks that it lacks, or does not take."""
    path = str(callback["_target_"])
    if path not in OWN:
        cure = meant(path, OWN)
        yield Complaint(f"callbacks.{name}._target_", path, "is no callback of the suite", cure)
        return
    kinds = get_type_hints(OWN[path])
    for field, value in callback.items():
        key = f"callbacks.{name}.{field}"
        if field == "_target_":
            continue
        if field not in kinds:
            cure = meant(field, kinds, f"callbacks.{name}.")
            yield Complaint(key, value, f"{path} has no such argument", cure)
        elif reason := _wrong(field, value, kinds[field]):
            default = getattr(OWN[path], field)
            yield Complaint(key, value, reason, f"it is {str(default).lower()} by default")


def _wrong(field: str, value: object, kind: type) -> str:
    """Returns why an argument cannot be that, or nothing."""
    if kind is bool:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if isinstance(value, bool) or not isinstance(value, int | (float if kind is float else int)):
        return "is not a number" if kind is float else "is not a whole number"
    least = LOWEST[field]
    if kind is float:
        return "" if least < value < float("inf") else f"must be above {least:g} and finite"
    return "" if least <= value <= LARGEST else f"must be {least} or more, and below 2**63"
