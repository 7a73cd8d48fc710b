"""Collective operations, and their cost on a ring of equal links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CollectiveKind(StrEnum):
    """Kind of a collective operation, or a point-to-point send."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_to_all = "all_to_all"
    broadcast = "broadcast"
    send = "send"


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size in a step, as seen by one rank."""

    kind: CollectiveKind
    """Kind of the operation."""
    axes: tuple[str, ...]
    """Mesh axes of the group."""
    bytes: int
    """Size of the larger of input and output on one rank."""
    count: int
    """Number of operations per step."""
    name: str
    """Name of the data, as in ``plan.json``."""
    overlaps: bool = False
    """Whether the operation overlaps with compute."""


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
