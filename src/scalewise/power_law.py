"""Exponent of a power law, fitted to measured points, with its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, linear_regression

from scalewise.confidence_interval import t_quantile

MIN_POINTS = 3
"""Fewest points with an interval."""


@dataclass(frozen=True)
class PowerLawFit:
    """Power law ``y = a x^exponent``, by least squares of ``log y`` on ``log x``."""

    exponent: float
    """Exponent; negative if y falls with x."""
    low: float
    """Lower end of the 95% confidence interval of the exponent."""
    high: float
    """Upper end of the 95% confidence interval of the exponent."""

    @property
    def text(self) -> str:
        """Exponent with its interval."""
        return f"{self.exponent:.3f} (95% interval {self.low:.3f} to {self.high:.3f})"


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLawFit:
    """Fit a power law to at least ``MIN_POINTS`` points with two or more different ``x``.

    The interval is that of linear regression with independent errors of ``log y`` of equal
    variance. With more than 10 degrees of freedom it is slightly too wide.

    Raises:
        ValueError: Too few points, equal ``x``, or values that are not positive.
    """
    if len(x) < MIN_POINTS:
        raise ValueError(f"{len(x)} points have no interval; give at least {MIN_POINTS}")
    log_x, log_y = [log(value) for value in x], [log(value) for value in y]
    slope, intercept = linear_regression(log_x, log_y)
    squared_errors = sum(
        (b - intercept - slope * a) ** 2 for a, b in zip(log_x, log_y, strict=True)
    )
    mean = fmean(log_x)
    degrees = len(x) - 2
    variance = squared_errors / degrees / sum((a - mean) ** 2 for a in log_x)
    margin = t_quantile(degrees) * sqrt(variance)
    return PowerLawFit(slope, slope - margin, slope + margin)
