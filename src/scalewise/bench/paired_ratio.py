"""How much longer one thing takes than another beside it: paired times and an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median

SPREAD = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(frozen=True)
class PairedRatio:
    """A median of paired ratios, with the 95 % interval of that median."""

    median: float
    low: float
    high: float
    pairs: int


def paired_ratio(times: Sequence[float], baseline_times: Sequence[float]) -> PairedRatio:
    """Returns how ``times`` compares with ``baseline_times``, taken in turns: theirs first and
    last.

    Each of ours is divided by the mean of its two neighbours, so that a machine that slows down
    slows both. The interval is that of order statistics: it assumes no distribution.
    """
    each = sorted(
        one / mean for one, mean in zip(times, _median_interval(baseline_times), strict=True)
    )
    count = len(each)
    reach = SPREAD * sqrt(count) / 2
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return PairedRatio(median(each), each[max(low, 0)], each[min(high, count - 1)], count)


def neighbor_excess(times: Sequence[float], baseline_times: Sequence[float]) -> list[float]:
    """Returns by how much each of ``times`` is more than the mean of its two neighbours."""
    return [one - mean for one, mean in zip(times, _median_interval(baseline_times), strict=True)]


def _median_interval(baseline_times: Sequence[float]) -> list[float]:
    return [(before + after) / 2 for before, after in pairwise(baseline_times)]
