"""Latency and bandwidth of a link from measured times: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from scalewise.parallelism.communication import CollectiveKind
from scalewise.parallelism.ring_cost import RingLink, bytes_per_link_fraction, num_hops

ROUNDS = 30
"""Reweightings; the estimate has settled to six digits by then."""
LEAST_ERROR = 1e-2
"""Relative error below which a sample gains no more weight."""


@dataclass(frozen=True)
class CollectiveSample:
    """The measured time of one collective."""

    kind: CollectiveKind
    ranks: int
    bytes: int
    """As ``Collective.bytes`` counts: the larger of what goes in and what comes out."""
    seconds: float
    """Median of the repeats, each the time of the slowest rank, s."""


def fit_link(samples: Sequence[CollectiveSample]) -> RingLink | None:
    """Returns the link whose ring model is off by the least factor, summed as ``|log factor|``.

    Twice too long and twice too short weigh alike, and a disturbed sample counts for no more than
    its factor. Solved by reweighted least squares in latency and seconds a byte, neither below
    zero. None where the times do not grow with the bytes.
    """
    rows = [
        (
            num_hops(s.kind, s.ranks) / s.seconds,
            bytes_per_link_fraction(s.kind, s.ranks) * s.bytes / s.seconds,
        )
        for s in samples
    ]
    weights = [1.0] * len(rows)
    latency = per_byte = 0.0
    for _ in range(ROUNDS):
        latency, per_byte = _solve_least_squares(rows, weights)
        weights = [_sample_weight(a * latency + b * per_byte) for a, b in rows]
    return RingLink(latency, 1 / per_byte) if per_byte > 0 else None


def link_error(link: RingLink, samples: Sequence[CollectiveSample]) -> float:
    """Returns the median relative error of a link's model."""
    return median(abs(link.seconds(s.kind, s.ranks, s.bytes) / s.seconds - 1) for s in samples)


def _sample_weight(factor: float) -> float:
    """Returns the weight that makes ``(1 - factor)**2`` the size of ``log(factor)``."""
    off = abs(log(max(factor, 1e-6)))
    if off < LEAST_ERROR:
        return 1 / LEAST_ERROR
    return off / (1 - factor) ** 2


def _solve_least_squares(
    rows: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Returns the non-negative ``(x, y)`` of the least weighted squares of ``1 - a x - b y``."""
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
