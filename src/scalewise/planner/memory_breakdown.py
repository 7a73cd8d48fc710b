"""Where the memory of one device goes: lines of bytes by phase of a step, and their peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StepPhase(StrEnum):
    """A moment of an optimizer step at which memory may be fullest."""

    forward = "forward"
    """The last block of forward runs."""
    loss = "loss"
    """Logits and loss are there."""
    backward_loss = "backward of the loss"
    """Backward goes through the head."""
    backward_head = "backward of the head"
    """The gradients of the logits go through the head."""
    backward_last = "backward of the last block"
    """Backward begins: activations are all there."""
    reduce_last = "reduction of the last block"
    """Its gradients are whole, and copied to be sent."""
    backward_next = "backward of the last block but one"
    """The gradients of the last are on their way to shards, and weights on theirs to whole ones."""
    backward_second = "backward of the second block"
    """As above, with fewer activations and more gradients."""
    backward_first = "backward of the first block"
    """Backward ends: gradients are nearly all there."""
    reduce_block = "reduction of the first block"
    """Its gradients are whole, and copied to be sent."""
    backward_embedding = "backward of the embedding"
    """Gradients are all there, and that of the embedding is made."""
    reduce_rest = "reduction of the rest"
    """The gradients outside of blocks are copied to be sent."""
    optimizer = "optimizer"
    """The optimizer steps."""


ALL_PHASES = tuple(StepPhase)


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes of one purpose on one device, by the phases in which they are there."""

    name: str
    bytes: Mapping[StepPhase, int]
    formula: str
    reason: str

    @property
    def max_bytes(self) -> int:
        """Returns the bytes of the phase that has most of it."""
        return max(self.bytes.values(), default=0)


@dataclass(frozen=True)
class MemoryBreakdown:
    """All lines of one device."""

    entries: tuple[MemoryEntry, ...]
    phases: Mapping[StepPhase, int] = field(init=False)

    def __post_init__(self) -> None:
        sums = {
            phase: sum(line.bytes.get(phase, 0) for line in self.entries) for phase in StepPhase
        }
        object.__setattr__(self, "phases", sums)

    @property
    def peak(self) -> int:
        """Returns the bytes of the fullest phase."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> StepPhase:
        """Returns the phase of the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase])
