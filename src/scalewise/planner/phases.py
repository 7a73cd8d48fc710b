"""The phases of a step in the order of a pass: what comes when, and how far blocks are in each."""

from __future__ import annotations

from scalewise.planner.memory_breakdown import MemoryEntry, StepPhase

BACKWARD = (
    StepPhase.backward_loss,
    StepPhase.backward_head,
    StepPhase.backward_last,
    StepPhase.reduce_last,
    StepPhase.backward_next,
    StepPhase.backward_second,
    StepPhase.backward_first,
    StepPhase.reduce_block,
    StepPhase.backward_embedding,
    StepPhase.reduce_rest,
)
PASSES = (StepPhase.forward, StepPhase.loss, *BACKWARD)
WITH_ROTATIONS = PASSES[: PASSES.index(StepPhase.reduce_block)]
"""Until the first block has taken its last look at them."""
STEPPED_IN_BACKWARD = (StepPhase.reduce_last, StepPhase.reduce_block, StepPhase.reduce_rest)
"""When shards are, as soon as they have been reduced."""
AFTER_HEAD = BACKWARD[BACKWARD.index(StepPhase.backward_last) :]


def blocks_by_phase(layers: int) -> dict[StepPhase, tuple[int, int]]:
    """Returns for each phase how many blocks await backward, and how many have been through it."""
    return {
        StepPhase.forward: (layers - 1, 0),
        StepPhase.loss: (layers, 0),
        StepPhase.backward_loss: (layers, 0),
        StepPhase.backward_head: (layers, 0),
        StepPhase.backward_last: (layers - 1, 0),
        StepPhase.reduce_last: (layers - 1, 0),
        StepPhase.backward_next: (max(0, layers - 2), min(1, layers - 1)),
        StepPhase.backward_second: (min(1, layers - 1), max(0, layers - 2)),
        StepPhase.backward_first: (0, layers - 1),
        StepPhase.reduce_block: (0, layers - 1),
        StepPhase.backward_embedding: (0, layers),
        StepPhase.reduce_rest: (0, layers),
    }


def constant_entry(
    name: str, size: int, phases: tuple[StepPhase, ...], formula: str, reason: str
) -> MemoryEntry:
    """Returns a line of as many bytes in each of its phases."""
    return MemoryEntry(name, dict.fromkeys(phases, size), formula, reason)
