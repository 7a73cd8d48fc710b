"""The axes of a search, as the grammar of a sweep names them. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from math import prod

from scalewise.errors import ConfigIssue

MOST_JOBS = 10_000
"""Jobs of the largest sweep; a larger one is rejected before its jobs are listed."""

Value = str | int | float
"""What an axis takes: a text as an override spells it, or a number."""


@dataclass(frozen=True)
class ChoiceAxis:
    """One of several values, each as it stands behind ``KEY=`` in an override."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class IntervalAxis:
    """A number from ``low`` to ``high``, both included; whole where both are integers."""

    key: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    """Distance of the values that are taken; None: any."""

    @property
    def is_integer(self) -> bool:
        """Returns whether only integers are taken."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what makes it no interval."""
        if not self.low < self.high:
            yield ConfigIssue(self.key, f"interval({self.low:g},{self.high:g})", "has no inside")
        elif self.log and self.low <= 0:
            reason = "a logarithmic axis begins above 0"
            yield ConfigIssue(self.key, f"interval({self.low:g},{self.high:g})", reason)


Axis = ChoiceAxis | IntervalAxis


def too_many(key: str, value: object, count: int) -> Iterator[ConfigIssue]:
    """Yields that a setting gives more than ``MOST_JOBS`` jobs."""
    if count > MOST_JOBS:
        shown = f"{count:,}" if count < 10**15 else "more than 10**15"
        reason = f"gives {shown} jobs, where a sweep has at most {MOST_JOBS:,}"
        yield ConfigIssue(key, value, reason, "give fewer values, or split the sweep")


def grid_size(space: Sequence[Axis]) -> int:
    """Returns the number of combinations of a grid's values; every interval needs a step."""
    return prod(
        len(axis.values) if isinstance(axis, ChoiceAxis) else _steps(axis) for axis in space
    )


def _steps(axis: IntervalAxis) -> int:
    assert axis.step is not None
    return round((Decimal(axis.high) - Decimal(axis.low)) / Decimal(axis.step)) + 1


def grid_points(space: Sequence[Axis]) -> list[dict[str, Value]]:
    """Returns every combination of the values; an interval needs a step."""
    return [
        dict(zip((axis.key for axis in space), values, strict=True))
        for values in product(*(_axis_values(axis) for axis in space))
    ]


def first_point(space: Sequence[Axis]) -> dict[str, Value]:
    """Returns the corner of the space where every axis has its first value."""
    return {a.key: a.values[0] if isinstance(a, ChoiceAxis) else a.low for a in space}


def point_overrides(params: Mapping[str, Value]) -> list[str]:
    """Returns what is typed for a point of the space."""
    return [f"{key}={value}" for key, value in round_point(params).items()]


def round_point(params: Mapping[str, Value]) -> dict[str, Value]:
    """Returns a point with its numbers to six digits: as jobs get them, and people read them."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in params.items()}


def _axis_values(axis: Axis) -> list[Value]:
    if isinstance(axis, ChoiceAxis):
        return list(axis.values)
    assert axis.step is not None
    return [axis.low + place * axis.step for place in range(_steps(axis))]
