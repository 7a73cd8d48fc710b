"""Axes of a search space, in the terms of Hydra's sweep syntax. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from math import prod

from scalewise.errors import ConfigIssue

MAX_JOBS = 10_000
"""Maximum number of jobs of a sweep; larger sweeps are rejected before their jobs are listed."""

Value = str | int | float
"""Value of an axis: the text of an override, or a number."""


@dataclass(frozen=True)
class ChoiceAxis:
    """Axis with a list of values."""

    key: str
    """Override key."""
    values: tuple[str, ...]
    """Values as in an override, after ``KEY=``."""


@dataclass(frozen=True)
class IntervalAxis:
    """Axis of numbers from ``low`` to ``high`` inclusive; integers if both bounds are integers."""

    key: str
    """Override key."""
    low: float
    """Lower bound."""
    high: float
    """Upper bound."""
    log: bool = False
    """Whether the scale is logarithmic."""
    step: float | None = None
    """Distance between values; None: continuous."""

    @property
    def is_integer(self) -> bool:
        """Whether the values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield the issues of the bounds."""
        if not self.low < self.high:
            yield ConfigIssue(
                self.key,
                f"interval({self.low:g},{self.high:g})",
                "the lower bound must be below the upper bound",
            )
        elif self.log and self.low <= 0:
            reason = "a logarithmic axis requires a lower bound above 0"
            yield ConfigIssue(self.key, f"interval({self.low:g},{self.high:g})", reason)


Axis = ChoiceAxis | IntervalAxis


def job_count_issues(key: str, value: object, count: int) -> Iterator[ConfigIssue]:
    """Yield an issue if a setting results in more than ``MAX_JOBS`` jobs."""
    if count > MAX_JOBS:
        jobs = f"{count:,}" if count < 10**15 else "more than 10**15"
        reason = f"results in {jobs} jobs, and the maximum is {MAX_JOBS:,}"
        yield ConfigIssue(key, value, reason, "reduce the number of values, or split the sweep")


def grid_size(space: Sequence[Axis]) -> int:
    """Number of points of the grid; every interval needs a step."""
    return prod(
        len(axis.values) if isinstance(axis, ChoiceAxis) else _num_values(axis) for axis in space
    )


def _num_values(axis: IntervalAxis) -> int:
    assert axis.step is not None
    return round((Decimal(axis.high) - Decimal(axis.low)) / Decimal(axis.step)) + 1


def grid_points(space: Sequence[Axis]) -> list[dict[str, Value]]:
    """All points of the grid; every interval needs a step."""
    return [
        dict(zip((axis.key for axis in space), values, strict=True))
        for values in product(*(_axis_values(axis) for axis in space))
    ]


def first_point(space: Sequence[Axis]) -> dict[str, Value]:
    """Point of the first value of every axis."""
    return {a.key: a.values[0] if isinstance(a, ChoiceAxis) else a.low for a in space}


def point_overrides(params: Mapping[str, Value]) -> list[str]:
    """Overrides of a point."""
    return [f"{key}={value}" for key, value in round_point(params).items()]


def round_point(params: Mapping[str, Value]) -> dict[str, Value]:
    """Point with numbers rounded to six significant digits, as in overrides and reports."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in params.items()}


def _axis_values(axis: Axis) -> list[Value]:
    if isinstance(axis, ChoiceAxis):
        return list(axis.values)
    assert axis.step is not None
    return [axis.low + index * axis.step for index in range(_num_values(axis))]
