"""Memory breakdown of a device: entries in bytes by phase of a step, and their peak.

The names of entries and the values of phases are keys of ``plan.json`` and stay as they are;
people read their titles.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple


class StepPhase(StrEnum):
    """Phase of an optimizer step at which memory may peak; the value is its key in records."""

    forward = "forward"
    """Forward of the last block."""
    loss = "loss"
    """Logits and loss."""
    backward_loss = "backward of the loss"
    """Backward of the loss."""
    backward_head = "backward of the head"
    """Backward of the output projection."""
    reduce_head = "reduction of the head"
    """Its gradients are complete and copied into a reduction buffer."""
    backward_last = "backward of the last block"
    """First block of the backward pass: all activations are alive."""
    reduce_last = "reduction of the last block"
    """Its gradients are complete and copied into a reduction buffer."""
    backward_next = "backward of the last block but one"
    """Gradients of the last block are reduced while parameters are prefetched."""
    backward_second = "backward of the second block"
    """As above, with fewer activations and more gradients."""
    backward_first = "backward of the first block"
    """Last block of the backward pass: nearly all gradients are alive."""
    reduce_block = "reduction of the first block"
    """Its gradients are complete and copied into a reduction buffer."""
    backward_embedding = "backward of the embedding"
    """All gradients are alive; that of the embedding is computed."""
    reduce_rest = "reduction of the rest"
    """Gradients outside of blocks are copied into a reduction buffer."""
    optimizer = "optimizer"
    """Optimizer step."""

    @property
    def description(self) -> str:
        """Name of the phase for people, as in "in the forward pass"."""
        return PHASE_DESCRIPTIONS[self]


PHASE_DESCRIPTIONS = {
    StepPhase.forward: "forward pass",
    StepPhase.loss: "loss computation",
    StepPhase.backward_loss: "backward pass of the loss",
    StepPhase.backward_head: "backward pass of the head",
    StepPhase.reduce_head: "gradient reduction of the head",
    StepPhase.backward_last: "backward pass of the last block",
    StepPhase.reduce_last: "gradient reduction of the last block",
    StepPhase.backward_next: "backward pass of the second-to-last block",
    StepPhase.backward_second: "backward pass of the second block",
    StepPhase.backward_first: "backward pass of the first block",
    StepPhase.reduce_block: "gradient reduction of the first block",
    StepPhase.backward_embedding: "backward pass of the embedding",
    StepPhase.reduce_rest: "gradient reduction outside of blocks",
    StepPhase.optimizer: "optimizer step",
}

ALL_PHASES = tuple(StepPhase)
NO_BYTES = dict.fromkeys(StepPhase, 0)
BACKWARD = (
    StepPhase.backward_loss,
    StepPhase.backward_head,
    StepPhase.reduce_head,
    StepPhase.backward_last,
    StepPhase.reduce_last,
    StepPhase.backward_next,
    StepPhase.backward_second,
    StepPhase.backward_first,
    StepPhase.reduce_block,
    StepPhase.backward_embedding,
    StepPhase.reduce_rest,
)
FORWARD = (StepPhase.forward, StepPhase.loss)
FORWARD_BACKWARD = (*FORWARD, *BACKWARD)
ROPE_PHASES = FORWARD_BACKWARD[: FORWARD_BACKWARD.index(StepPhase.reduce_block)]
"""Phases before the last use of the RoPE tables, in the backward of the first block."""
REDUCTION_PHASES = (
    StepPhase.reduce_head,
    StepPhase.reduce_last,
    StepPhase.reduce_block,
    StepPhase.reduce_rest,
)
"""Phases in which ``optimizer.in_backward`` steps shards, right after their reduction."""
HEAD_PHASES = (StepPhase.loss, StepPhase.backward_loss, StepPhase.backward_head)
"""Phases in which the weights of the head are read."""
AFTER_HEAD = BACKWARD[BACKWARD.index(StepPhase.backward_last) :]
"""Phases of the backward pass after the head."""

ENTRY_TITLES = {
    "average": "EMA weights",
    "step": "optimizer temporaries",
    "masters": "master weights",
    "small weights": "unsharded small parameters",
    "buckets": "gradient buckets",
    "buckets on their way": "reduction buffers",
    "gathered weights": "gathered parameters",
    "gather buffer": "parameter gather buffer",
    "gathered weights of blocks": "gathered block parameters",
    "gathered weights outside of blocks": "gathered parameters outside of blocks",
    "gradient of the embedding": "embedding gradient",
    "gradient of the tied head": "tied head gradient",
    "gradients of earlier micro batches": "gradients of earlier micro-batches",
    "gradients of this pass": "gradients of this micro-batch",
    "gradients on their way to shards": "gradient reduction buffers",
    "whole gradients": "unsharded gradients",
    "sums over replicas": "all-reduced gradient shards",
    "activations of blocks": "block activations",
    "activations of the embedding": "embedding activations",
    "activations of the head": "head activations",
    "activations of other pieces": "activations of other micro-batches",
    "kept for weight gradients": "tensors for weight gradients",
    "rotations": "RoPE tables",
    "at work": "temporary tensors",
    "output of the stage": "stage output",
    "buffers between stages": "pipeline communication buffers",
    "what else is alive": "other tensors",
    "workspaces": "cuBLAS workspaces",
    "traced": "traced peak",
    "offloaded masters": "offloaded master weights",
    "weights and gradients": "streamed weights and gradients",
    "offloaded average": "offloaded EMA weights",
    "checkpoint on its way": "checkpoint copy",
    "rows": "data loader batches",
}
"""Title of each entry whose key is no term of the field."""


def entry_title(name: str) -> str:
    """Return the name of an entry for people, from its key in ``plan.json``."""
    return ENTRY_TITLES.get(name, name)


class MemoryEntry(NamedTuple):
    """Memory of one purpose on one device."""

    name: str
    """Key of the entry in ``plan.json``."""
    bytes: Mapping[StepPhase, int]
    """Size by phase; zero in all other phases."""
    formula: str
    """Formula of the size."""
    reason: str
    """Meaning of the entry."""

    @property
    def title(self) -> str:
        """Name of the entry for people."""
        return entry_title(self.name)

    @property
    def max_bytes(self) -> int:
        """Largest size over all phases, in bytes."""
        return max(self.bytes.values(), default=0)

    def without(self, phases: Container[StepPhase]) -> MemoryEntry:
        """Entry with zero bytes in ``phases``."""
        sizes = {phase: size for phase, size in self.bytes.items() if phase not in phases}
        return MemoryEntry(self.name, sizes, self.formula, self.reason)


class EntryGroup(NamedTuple):
    """Entries that depend on the same options, and their sums."""

    entries: tuple[MemoryEntry, ...]
    """Entries that are not empty."""
    sums: tuple[int, ...]
    """Sum of the entries at each of ``ALL_PHASES``, in bytes."""


def group_entries(entries: Iterable[MemoryEntry]) -> EntryGroup:
    """Return entries without empty ones, and their sums."""
    filled = tuple(entry for entry in entries if entry.max_bytes)
    return EntryGroup(filled, tuple(_sum_by_phase(filled).values()))


def _sum_by_phase(entries: Iterable[MemoryEntry]) -> dict[StepPhase, int]:
    sums = NO_BYTES.copy()
    for entry in entries:
        for phase, size in entry.bytes.items():
            sums[phase] += size
    return sums


@dataclass(frozen=True)
class MemoryBreakdown:
    """All entries of one device."""

    entries: tuple[MemoryEntry, ...]
    """Entries, in order of computation."""

    @cached_property
    def phases(self) -> Mapping[StepPhase, int]:
        """Sum of the entries by phase, in bytes."""
        return _sum_by_phase(self.entries)

    @classmethod
    def with_sums(cls, entries: tuple[MemoryEntry, ...], sums: Iterable[int]) -> MemoryBreakdown:
        """Breakdown whose sums at ``ALL_PHASES`` are known."""
        breakdown = cls(entries)
        breakdown.__dict__["phases"] = dict(zip(ALL_PHASES, sums, strict=True))
        return breakdown

    @cached_property
    def peak(self) -> int:
        """Peak memory, in bytes."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> StepPhase:
        """Phase of the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase])


def constant_entry(
    name: str, size: int, phases: tuple[StepPhase, ...], formula: str, reason: str
) -> MemoryEntry:
    """Entry of the same size in each of ``phases``."""
    return MemoryEntry(name, dict.fromkeys(phases, size), formula, reason)


@lru_cache(maxsize=4096)
def blocks_by_phase(layers: int, middle: int | None = None) -> Mapping[StepPhase, tuple[int, int]]:
    """Number of blocks before and after their backward, by phase.

    ``middle``: block whose backward replaces that of the last block but one.
    """
    middle = max(0, layers - 2) if middle is None else middle
    return {
        StepPhase.forward: (layers - 1, 0),
        StepPhase.loss: (layers, 0),
        StepPhase.backward_loss: (layers, 0),
        StepPhase.backward_head: (layers, 0),
        StepPhase.reduce_head: (layers, 0),
        StepPhase.backward_last: (layers - 1, 0),
        StepPhase.reduce_last: (layers - 1, 0),
        StepPhase.backward_next: (middle, layers - 1 - middle),
        StepPhase.backward_second: (min(1, layers - 1), max(0, layers - 2)),
        StepPhase.backward_first: (0, layers - 1),
        StepPhase.reduce_block: (0, layers - 1),
        StepPhase.backward_embedding: (0, layers),
        StepPhase.reduce_rest: (0, layers),
    }
