"""Fit of the latency and bandwidth of a link to measured times of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from scalewise.parallelism.collective import (
    CollectiveKind,
    RingLink,
    bytes_per_link_fraction,
    num_hops,
)

ITERATIONS = 30
"""Iterations of reweighted least squares; the estimate converges to six digits."""
MIN_ERROR = 1e-2
"""Relative error below which the weight of a sample no longer increases."""


@dataclass(frozen=True)
class CollectiveSample:
    """Measured time of one collective."""

    kind: CollectiveKind
    """Kind of the collective."""
    ranks: int
    """Number of ranks."""
    bytes: int
    """Size as in ``Collective.bytes``: the larger of input and output."""
    seconds: float
    """Median over the repeats of the time of the slowest rank, in seconds."""


def fit_link(samples: Sequence[CollectiveSample]) -> RingLink | None:
    """Fit a ring model to measured times.

    The fit minimizes the sum of ``|log(predicted / measured)|`` by iteratively reweighted least
    squares, with non-negative latency and inverse bandwidth. So errors by a factor and by its
    inverse have the same weight, and outliers have a limited effect.

    Returns:
        The link; None if times do not increase with size.
    """
    rows = [
        (
            num_hops(s.kind, s.ranks) / s.seconds,
            bytes_per_link_fraction(s.kind, s.ranks) * s.bytes / s.seconds,
        )
        for s in samples
    ]
    weights = [1.0] * len(rows)
    latency = seconds_per_byte = 0.0
    for _ in range(ITERATIONS):
        latency, seconds_per_byte = _solve_least_squares(rows, weights)
        weights = [_sample_weight(a * latency + b * seconds_per_byte) for a, b in rows]
    return RingLink(latency, 1 / seconds_per_byte) if seconds_per_byte > 0 else None


def link_error(link: RingLink, samples: Sequence[CollectiveSample]) -> float:
    """Median relative error of the ring model of a link."""
    return median(abs(link.seconds(s.kind, s.ranks, s.bytes) / s.seconds - 1) for s in samples)


def _sample_weight(factor: float) -> float:
    """Weight with which ``(1 - factor)**2`` equals ``|log(factor)|``."""
    error = abs(log(max(factor, 1e-6)))
    if error < MIN_ERROR:
        return 1 / MIN_ERROR
    return error / (1 - factor) ** 2


def _solve_least_squares(
    rows: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Non-negative ``(x, y)`` that minimize the weighted squares of ``1 - a x - b y``."""
    weighted = list(zip(rows, weights, strict=True))
    aa = sum(w * a * a for (a, _), w in weighted)
    ab = sum(w * a * b for (a, b), w in weighted)
    bb = sum(w * b * b for (_, b), w in weighted)
    ra = sum(w * a for (a, _), w in weighted)
    rb = sum(w * b for (_, b), w in weighted)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (ra * bb - rb * ab) / determinant, (rb * aa - ra * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
        if x < 0:
            return 0.0, rb / bb
    return ra / aa, 0.0
