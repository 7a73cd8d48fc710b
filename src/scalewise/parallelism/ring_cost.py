"""Cost of a collective on a ring of equal links, from latency and bandwidth; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.parallelism.communication import CollectiveKind


def num_hops(kind: CollectiveKind, ranks: int) -> int:
    """Return the number of sequential messages of a ring collective.

    All-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009). All-to-all has one
    round per other rank. A broadcast is a chain.
    """
    if kind is CollectiveKind.send:
        return 1
    return (2 if kind is CollectiveKind.all_reduce else 1) * (ranks - 1)


def bytes_per_link_fraction(kind: CollectiveKind, ranks: int) -> float:
    """Return the share of ``Collective.bytes`` that crosses each link of the ring."""
    if kind in (CollectiveKind.send, CollectiveKind.broadcast):
        return 1.0
    return (2 if kind is CollectiveKind.all_reduce else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class RingLink:
    """One directed link of a ring."""

    latency_s: float
    """Latency of an empty message, in seconds."""
    bytes_per_s: float
    """Bandwidth, in bytes/s."""

    def seconds(self, kind: CollectiveKind, ranks: int, size: int) -> float:
        """Return the time of one collective, in seconds; ``size`` is ``Collective.bytes``."""
        return (
            num_hops(kind, ranks) * self.latency_s
            + bytes_per_link_fraction(kind, ranks) * size / self.bytes_per_s
        )
