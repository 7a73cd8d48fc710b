"""Arguments of scalewise's callbacks, checked without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from scalewise.errors import ConfigIssue, did_you_mean
from scalewise.typed_override import format_override
from scalewise.units import MAX_NUMBER

MIN_VALUES = {
    "factor": 1.0,
    "patience": 1,
    "every": 1,
    "floor": 0,
    "wait": 0,
    "active": 1,
    "step": 0,
    "rank": 0,
    "decay": 0.0,
    "update_every_n_steps": 1,
    "update_starting_at_step": 0,
    "perturbation": 0.0,
    "batches_per_step": 1,
}
"""Minimum of each numeric argument; ``factor`` must exceed it."""
UPPER_BOUNDS = {"decay": 1.0, "perturbation": 1.0}
"""Exclusive upper bounds; these arguments may equal their minimum."""


class CallbackArgs:
    """Base class of callback arguments; checks them also when a callback is created in code.

    Raises:
        ValueError: an argument is out of range.
    """

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(type(self)).items():
            if field in MIN_VALUES and (
                reason := _argument_issue(field, getattr(self, field), kind)
            ):
                raise ValueError(f"{field}={getattr(self, field)} {reason}")


@dataclass(eq=False)  # callbacks are compared by identity
class LossGuardArgs(CallbackArgs):
    """Arguments of ``loss_guard.LossGuard``."""

    factor: float = 3.0
    """Ratio to the running mean above which a loss is a spike."""
    patience: int = 5
    """Number of consecutive spikes that stop the run."""
    every: int = 10
    """Interval between checks, in micro-batches."""
    floor: float = 0.1
    """Loss up to which nothing is a spike."""


@dataclass(eq=False)
class ProfilerArgs(CallbackArgs):
    """Arguments of ``profiler.Profiler``."""

    wait: int = 5
    """Unrecorded phase at the start, in micro-batches."""
    active: int = 3
    """Recorded phase, in micro-batches."""


@dataclass(eq=False)
class EMAArgs(CallbackArgs):
    """Arguments of ``ema.EMAWeightAveraging``."""

    decay: float = 0.999
    """Weight of the previous average in each update."""
    use_buffers: bool = False
    """Whether floating-point buffers are averaged too, instead of copied from the
    trained module."""
    update_every_n_steps: int = 1
    """Interval between updates, in optimizer steps."""
    update_starting_at_step: int = 0
    """Delay before the first update, in optimizer steps; until then there is no average."""

    @property
    def average_tensors(self) -> list[Any]:
        """Averages on this rank."""
        return []


@dataclass(eq=False)
class FaultArgs(CallbackArgs):
    """Arguments of the faults in ``fault_injection``."""

    step: int = 3
    """Delay before the fault, in optimizer steps."""
    rank: int = 0
    """Rank on which the fault occurs."""
    once: bool = False
    """Whether the fault is skipped when the job restarts in the same folder."""


@dataclass(eq=False)
class StateRecorderArgs(CallbackArgs):
    """Arguments of ``state_recorder.StateRecorder``."""

    perturbation: float = 0.0
    """Largest relative change of each weight before the first step."""
    batches_per_step: int = 1
    """Number of batches per optimizer step of a user-defined module, which the data-parallel ranks
    of another run read; 1: as configured."""
    contributions: bool = False
    """Whether the gradient of each micro-batch of the first step is written too."""


_PACKAGE = "scalewise.training.callbacks"
STATE_RECORDER = f"{_PACKAGE}.state_recorder.StateRecorder"
EMA = f"{_PACKAGE}.ema.EMAWeightAveraging"
AVERAGE_BYTES_PER_ELEMENT = 4
"""Bytes per element of the average, which is fp32."""
BUILTIN_CALLBACKS: dict[str, type] = {
    f"{_PACKAGE}.loss_guard.LossGuard": LossGuardArgs,
    f"{_PACKAGE}.profiler.Profiler": ProfilerArgs,
    EMA: EMAArgs,
    STATE_RECORDER: StateRecorderArgs,
    **dict.fromkeys(
        (
            f"{_PACKAGE}.fault_injection.Inject{name}"
            for name in ("Exception", "OutOfMemory", "Hang", "Kill")
        ),
        FaultArgs,
    ),
}
"""Arguments of each callback by its ``_target_``."""


def is_builtin(path: object) -> bool:
    """Whether a ``_target_`` is a class of scalewise."""
    return str(path).split(".")[0] == "scalewise"


def averaging_callback(callbacks: Mapping[str, Mapping[str, object]]) -> str | None:
    """Name of the callback that averages the weights; None: the run has none."""
    return next((name for name, it in callbacks.items() if it.get("_target_") == EMA), None)


@cache
def _argument_types(path: str) -> Mapping[str, Any]:
    """Type of each argument of a scalewise callback."""
    return get_type_hints(BUILTIN_CALLBACKS[path])


def callback_arg_issues(name: str, callback: Mapping[str, object]) -> Iterator[ConfigIssue]:
    """Issues of the arguments of a scalewise callback: unknown names and invalid values."""
    path = str(callback["_target_"])
    if path not in BUILTIN_CALLBACKS:
        fix = did_you_mean(path, BUILTIN_CALLBACKS)
        yield ConfigIssue(f"callbacks.{name}._target_", path, "is not a scalewise callback", fix)
        return
    kinds = _argument_types(path)
    for field, value in callback.items():
        key = f"callbacks.{name}.{field}"
        if field == "_target_":
            continue
        if field not in kinds:
            fix = did_you_mean(field, kinds, f"callbacks.{name}.")
            yield ConfigIssue(key, value, f"is not an argument of {path}", fix)
        elif reason := _argument_issue(field, value, kinds[field]):
            default = getattr(BUILTIN_CALLBACKS[path], field)
            yield ConfigIssue(key, value, reason, f"the default is {format_override(key, default)}")


def _argument_issue(field: str, value: object, kind: type) -> str:
    """Reason why a value is invalid for an argument; empty: it is valid."""
    if kind is bool:
        return "" if isinstance(value, bool) else "is not true or false"
    if isinstance(value, bool) or not isinstance(value, int | (float if kind is float else int)):
        return "is not a number" if kind is float else "is not an integer"
    minimum = MIN_VALUES[field]
    if field in UPPER_BOUNDS:
        return (
            ""
            if minimum <= value < UPPER_BOUNDS[field]
            else f"must be in [{minimum:g}, {UPPER_BOUNDS[field]:g})"
        )
    if kind is float:
        return "" if minimum < value < float("inf") else f"must be above {minimum:g} and finite"
    return "" if minimum <= value <= MAX_NUMBER else f"must be {minimum} or more, and below 2**63"
