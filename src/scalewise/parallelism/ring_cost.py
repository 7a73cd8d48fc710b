"""What a collective costs on a ring of equal links: latency and bandwidth, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.parallelism.communication import CollectiveKind


def num_hops(kind: CollectiveKind, ranks: int) -> int:
    """Returns how many messages follow each other: a gather or a scatter goes once around.

    All-reduce is a scatter and a gather (Patarasuk and Yuan, 2009); all-to-all has a round for
    each other rank; a broadcast is a chain.
    """
    if kind is CollectiveKind.send:
        return 1
    return (2 if kind is CollectiveKind.all_reduce else 1) * (ranks - 1)


def bytes_per_link_fraction(kind: CollectiveKind, ranks: int) -> float:
    """Returns what part of a collective's bytes crosses each link of the ring."""
    if kind in (CollectiveKind.send, CollectiveKind.broadcast):
        return 1.0
    return (2 if kind is CollectiveKind.all_reduce else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class RingLink:
    """One link of a ring, one direction."""

    latency_s: float
    """Time of an empty message, s."""
    bytes_per_s: float
    """Bandwidth, bytes/s."""

    def seconds(self, kind: CollectiveKind, ranks: int, size: int) -> float:
        """Returns the time of one collective of ``size`` bytes, as ``Collective.bytes`` counts."""
        return (
            num_hops(kind, ranks) * self.latency_s
            + bytes_per_link_fraction(kind, ranks) * size / self.bytes_per_s
        )
