"""Main effects and two-factor interactions of a two-level factorial design.

A linear model of the logarithm of the measurement with a column of -1 and 1 per factor, so that
effects multiply (Box, Hunter and Hunter, Statistics for Experimenters, 2nd edition, 2005, chapters
5 and 6). Changes are fractions: -0.3 is 30 % less, averaged over the other factors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Name = tuple[str, ...]
"""One factor, or the two factors of an interaction."""

CONFIDENCE = 0.95
MIN_CHANGE = 1e-4
"""Smallest significant change: byte counts have no noise, so their intervals are empty."""

COLLINEAR = 1e-9
"""Relative residual below which a column is a linear combination of others."""


@dataclass(frozen=True)
class FactorEffect:
    """Main effect of a factor, or interaction of two.

    A main effect is the change from the first level to the second. An interaction is the further
    change of one factor at the second level of the other, relative to the average.
    """

    name: Name
    """The factor or factors."""
    change: float
    """Relative change."""
    low: float | None
    """Lower end of the 95 % interval; ``None`` without degrees of freedom."""
    high: float | None
    """Upper end of the 95 % interval."""
    aliases: tuple[Name, ...] = ()
    """Interactions that the design cannot distinguish from this effect."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        if self.low is None or self.high is None or abs(self.change) < MIN_CHANGE:
            return False
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class FactorEffects:
    """Effects on one metric."""

    effects: tuple[FactorEffect, ...]
    """Effects, largest first."""
    inestimable: tuple[Name, ...]
    """Effects that cannot be estimated, because some jobs failed."""
    jobs: int
    """Number of jobs."""
    degrees_of_freedom: int
    """Degrees of freedom of the residual variance."""


def factor_effects(levels: Mapping[str, Sequence[int]], measured: Sequence[float]) -> FactorEffects:
    """Estimate main effects and two-factor interactions.

    Args:
        levels: Level, -1 or 1, of each job by factor.
        measured: Positive measurement of each job.

    Interactions of three or more factors count as noise.
    """
    logs = np.log(np.asarray(measured, dtype=float))
    intercept = np.ones_like(logs)
    columns: dict[Name, Floats] = {
        (key,): np.asarray(each, dtype=float) for key, each in levels.items()
    }
    for one, other in combinations(levels, 2):
        columns[one, other] = columns[(one,)] * columns[(other,)]
    independent: dict[Name, Floats] = {}
    aliases: dict[Name, list[Name]] = {}
    inestimable: list[Name] = []
    for name, column in columns.items():
        if _relative_residual([intercept, *independent.values()], column) > COLLINEAR:
            independent[name] = column
        elif (alias := _find_alias(independent, column)) is not None:
            aliases.setdefault(alias, []).append(name)
        else:
            inestimable.append(name)
    matrix = np.column_stack([intercept, *independent.values()])
    inverse = np.linalg.inv(matrix.T @ matrix)
    fitted = inverse @ matrix.T @ logs
    degrees_of_freedom = len(logs) - matrix.shape[1]
    half_widths = np.full(len(fitted), np.nan)
    if degrees_of_freedom > 0:
        variance = float(np.sum((logs - matrix @ fitted) ** 2)) / degrees_of_freedom
        half_widths = student_t_95(degrees_of_freedom) * np.sqrt(variance * np.diag(inverse))
    effects = [
        FactorEffect(
            name, *_effect_shares(fitted[index], half_widths[index]), tuple(aliases.get(name, ()))
        )
        for index, name in enumerate(independent, start=1)
    ]
    effects.sort(key=lambda effect: -abs(np.log1p(effect.change)))
    return FactorEffects(tuple(effects), tuple(inestimable), len(logs), degrees_of_freedom)


def student_t_95(degrees_of_freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    With ``t = sqrt(n) tan(angle)`` for ``n`` degrees of freedom, the density is a power of the
    cosine, which is integrated numerically.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    cumulative = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(
        np.sqrt(degrees_of_freedom)
        * np.tan(np.interp(CONFIDENCE, cumulative / cumulative[-1], angles))
    )


def _effect_shares(
    coefficient: float, half_width: float
) -> tuple[float, float | None, float | None]:
    """Relative change and its interval; from -1 to 1 is twice the coefficient."""
    ends = (
        (None, None)
        if np.isnan(half_width)
        else (coefficient - half_width, coefficient + half_width)
    )
    low, high = (None if end is None else float(np.expm1(2 * end)) for end in ends)
    return float(np.expm1(2 * coefficient)), low, high


def _relative_residual(known_columns: Sequence[Floats], column: Floats) -> float:
    """Norm of the residual of ``column`` regressed on ``known_columns``, relative to its norm."""
    matrix = np.column_stack(known_columns)
    residual = column - matrix @ np.linalg.lstsq(matrix, column, rcond=None)[0]
    return float(np.linalg.norm(residual) / np.linalg.norm(column))


def _find_alias(known_columns: Mapping[Name, Floats], column: Floats) -> Name | None:
    names: Iterator[Name] = (n for n, k in known_columns.items() if abs(k @ column) == len(column))
    return next(names, None)
