"""Ratio of interleaved step times, with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median

NORMAL_QUANTILE = 1.96
"""Half width of a 95% confidence interval, in standard deviations."""


@dataclass(frozen=True)
class PairedRatio:
    """Median of paired ratios, with a 95% confidence interval."""

    median: float
    """Median of the ratios."""
    low: float
    """Lower bound of the interval."""
    high: float
    """Upper bound of the interval."""
    pairs: int
    """Number of ratios."""


def paired_ratio(times: Sequence[float], baseline_times: Sequence[float]) -> PairedRatio:
    """Compare ``times`` with interleaved ``baseline_times``, which start and end the sequence.

    Each time is divided by the mean of its two neighbors, so that changes in the speed of the
    machine cancel. The interval uses order statistics and assumes no distribution.
    """
    ratios = [
        time / mean for time, mean in zip(times, _neighbor_means(baseline_times), strict=True)
    ]
    return PairedRatio(*order_interval(ratios), len(ratios))


def order_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median of values and its 95% confidence interval by order statistics."""
    ordered, count = sorted(values), len(values)
    half_width = NORMAL_QUANTILE * sqrt(count) / 2
    low, high = int(count / 2 - half_width), int(count / 2 + half_width)
    return median(ordered), ordered[max(low, 0)], ordered[min(high, count - 1)]


def neighbor_excess(times: Sequence[float], baseline_times: Sequence[float]) -> list[float]:
    """Difference of each time and the mean of its two neighbors in ``baseline_times``."""
    return [time - mean for time, mean in zip(times, _neighbor_means(baseline_times), strict=True)]


def _neighbor_means(baseline_times: Sequence[float]) -> list[float]:
    return [(before + after) / 2 for before, after in pairwise(baseline_times)]
