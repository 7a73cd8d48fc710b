"""Order of the phases of a step, and the progress of the backward pass in each."""

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
FORWARD_BACKWARD = (StepPhase.forward, StepPhase.loss, *BACKWARD)
ROPE_PHASES = FORWARD_BACKWARD[: FORWARD_BACKWARD.index(StepPhase.reduce_block)]
"""Phases before the last use of the RoPE tables, in the backward of the first block."""
REDUCTION_PHASES = (StepPhase.reduce_last, StepPhase.reduce_block, StepPhase.reduce_rest)
"""Phases in which ``optimizer.in_backward`` steps shards, right after their reduction."""
AFTER_HEAD = BACKWARD[BACKWARD.index(StepPhase.backward_last) :]
"""Phases of the backward pass after the head."""


def blocks_by_phase(layers: int) -> dict[StepPhase, tuple[int, int]]:
    """Return the number of blocks before and after their backward, by phase."""
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
    """Return an entry of the same size in each of ``phases``."""
    return MemoryEntry(name, dict.fromkeys(phases, size), formula, reason)
