"""What each of several two-level choices did to a measurement, alone and in pairs. Pure.

A linear model of the logarithm with a column of -1 and 1 for each factor, so that effects
multiply: Box, Hunter and Hunter, Statistics for Experimenters, 2nd edition, 2005, chapters 5 and
6. Figures are shares: -0.3 is 30 % less, averaged over what else varied.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Name = tuple[str, ...]
"""One factor, or the two of an interaction."""

CONFIDENCE = 0.95
LEAST = 1e-4
"""A change below this is none, however sure: bytes are counted without noise."""

SAME = 1e-9
"""Below this, what is left of a column beside the others is rounding."""


@dataclass(frozen=True)
class FactorEffect:
    """A factor's change from its first level to its second, or what two do beside their own.

    An interaction is how much more the first changes where the second is at its second level than
    on average; the other way round it is the same number.
    """

    name: Name
    change: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval; None without degrees of freedom."""
    aliases: tuple[Name, ...] = ()
    """Interactions that these jobs cannot tell from it."""

    @property
    def is_significant(self) -> bool:
        """Returns whether the interval leaves out no change at all."""
        if self.low is None or self.high is None or abs(self.change) < LEAST:
            return False
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class FactorEffects:
    """All effects on one measurement, the largest first."""

    effects: tuple[FactorEffect, ...]
    inestimable: tuple[Name, ...]
    """What cannot be told for want of jobs, because some failed."""
    jobs: int
    degrees_of_freedom: int
    """Degrees of freedom of the residual variance."""


def factor_effects(levels: Mapping[str, Sequence[int]], measured: Sequence[float]) -> FactorEffects:
    """Returns the effects on ``measured``, positive numbers, a job each.

    ``levels`` is by factor -1 or 1 for each job. Interactions of two are told where the jobs
    allow; those of three and more are taken for noise.
    """
    logs = np.log(np.asarray(measured, dtype=float))
    whole = np.ones_like(logs)
    columns: dict[Name, Floats] = {
        (key,): np.asarray(each, dtype=float) for key, each in levels.items()
    }
    for one, other in combinations(levels, 2):
        columns[one, other] = columns[(one,)] * columns[(other,)]
    kept: dict[Name, Floats] = {}
    aliases: dict[Name, list[Name]] = {}
    untold: list[Name] = []
    for name, column in columns.items():
        if _residual_length([whole, *kept.values()], column) > SAME:
            kept[name] = column
        elif (same := _is_same(kept, column)) is not None:
            aliases.setdefault(same, []).append(name)
        else:
            untold.append(name)
    matrix = np.column_stack([whole, *kept.values()])
    inverse = np.linalg.inv(matrix.T @ matrix)
    fitted = inverse @ matrix.T @ logs
    freedom = len(logs) - matrix.shape[1]
    reach = np.full(len(fitted), np.nan)
    if freedom > 0:
        variance = float(np.sum((logs - matrix @ fitted) ** 2)) / freedom
        reach = student_t_95(freedom) * np.sqrt(variance * np.diag(inverse))
    found = [
        FactorEffect(
            name, *_effect_shares(fitted[place], reach[place]), tuple(aliases.get(name, ()))
        )
        for place, name in enumerate(kept, start=1)
    ]
    found.sort(key=lambda effect: -abs(np.log1p(effect.change)))
    return FactorEffects(tuple(found), tuple(untold), len(logs), freedom)


def student_t_95(degrees_of_freedom: float) -> float:
    """Returns what 95 % of Student's t stay below in size.

    With ``t = sqrt(freedom) tan(angle)`` the density is a power of the cosine, summed here.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    heights = np.cos(angles) ** (degrees_of_freedom - 1)
    below = np.concatenate([[0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return float(
        np.sqrt(degrees_of_freedom) * np.tan(np.interp(CONFIDENCE, below / below[-1], angles))
    )


def _effect_shares(
    coefficient: float, half_width: float
) -> tuple[float, float | None, float | None]:
    """Returns a change as a share with its interval; from -1 to 1 is twice the coefficient."""
    ends = (
        (None, None)
        if np.isnan(half_width)
        else (coefficient - half_width, coefficient + half_width)
    )
    low, high = (None if end is None else float(np.expm1(2 * end)) for end in ends)
    return float(np.expm1(2 * coefficient)), low, high


def _residual_length(known_columns: Sequence[Floats], column: Floats) -> float:
    """Returns the length of what ``known_columns`` columns leave of one, of 1 where it is new to
    them."""
    matrix = np.column_stack(known_columns)
    rest = column - matrix @ np.linalg.lstsq(matrix, column, rcond=None)[0]
    return float(np.linalg.norm(rest) / np.linalg.norm(column))


def _is_same(known_columns: Mapping[Name, Floats], column: Floats) -> Name | None:
    pairs: Iterator[Name] = (n for n, k in known_columns.items() if abs(k @ column) == len(column))
    return next(pairs, None)
