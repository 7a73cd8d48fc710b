"""The axes of a search, as the grammar of a sweep names them. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from scalewise.errors import Complaint

Value = str | int | float
"""What an axis takes: a text as an override spells it, or a number."""


@dataclass(frozen=True)
class Choice:
    """One of several values, each as it stands behind ``KEY=`` in an override."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Interval:
    """A number from ``low`` to ``high``, both included; whole where both are integers."""

    key: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    """Distance of the values that are taken; None: any."""

    @property
    def whole(self) -> bool:
        """Returns whether only integers are taken."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def complaints(self) -> Iterator[Complaint]:
        """Yields what makes it no interval."""
        if not self.low < self.high:
            yield Complaint(self.key, f"interval({self.low:g},{self.high:g})", "has no inside")
        elif self.log and self.low <= 0:
            reason = "a logarithmic axis begins above 0"
            yield Complaint(self.key, f"interval({self.low:g},{self.high:g})", reason)


Axis = Choice | Interval


def grid(space: Sequence[Axis]) -> list[dict[str, Value]]:
    """Returns every combination of the values; an interval needs a step."""
    return [
        dict(zip((axis.key for axis in space), values, strict=True))
        for values in product(*(_values(axis) for axis in space))
    ]


def first(space: Sequence[Axis]) -> dict[str, Value]:
    """Returns the corner of the space where every axis has its first value."""
    return {a.key: a.values[0] if isinstance(a, Choice) else a.low for a in space}


def overrides(params: Mapping[str, Value]) -> list[str]:
    """Returns what is typed for a point of the space."""
    return [f"{key}={value}" for key, value in rounded(params).items()]


def rounded(params: Mapping[str, Value]) -> dict[str, Value]:
    """Returns a point with its numbers to six digits: as jobs get them, and people read them."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in params.items()}


def _values(axis: Axis) -> list[Value]:
    if isinstance(axis, Choice):
        return list(axis.values)
    assert axis.step is not None
    count = round((axis.high - axis.low) / axis.step) + 1
    return [axis.low + place * axis.step for place in range(count)]
