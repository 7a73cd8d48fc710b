"""Confidence intervals of few measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's t distribution with 1 to 10 degrees of freedom."""
MIN_VALUES = 2
"""Fewest values with an interval."""


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t distribution; that of 10 degrees of freedom if there are more.

    Args:
        degrees: Degrees of freedom, at least 1.
    """
    return _T_QUANTILES[min(degrees, len(_T_QUANTILES)) - 1]


@dataclass(frozen=True)
class MeanInterval:
    """Mean of measurements with its 95% confidence interval."""

    mean: float
    """Mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Mean of at least ``MIN_VALUES`` independent, normally distributed values with its interval.

    Raises:
        ValueError: Too few values.
    """
    if len(values) < MIN_VALUES:
        raise ValueError(f"{len(values)} values have no interval; give at least {MIN_VALUES}")
    mean = fmean(values)
    margin = t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return MeanInterval(mean, mean - margin, mean + margin)
