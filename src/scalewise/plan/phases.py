"""The phases of a step in the order of a pass: what comes when, and how far blocks are in each."""

from __future__ import annotations

from scalewise.plan.ledger import Line, Phase

BACKWARD = (
    Phase.backward_loss,
    Phase.backward_head,
    Phase.backward_last,
    Phase.reduce_last,
    Phase.backward_next,
    Phase.backward_second,
    Phase.backward_first,
    Phase.reduce_block,
    Phase.backward_embedding,
    Phase.reduce_rest,
)
PASSES = (Phase.forward, Phase.loss, *BACKWARD)
WITH_ROTATIONS = PASSES[: PASSES.index(Phase.reduce_block)]
"""Until the first block has taken its last look at them."""
STEPPED_IN_BACKWARD = (Phase.reduce_last, Phase.reduce_block, Phase.reduce_rest)
"""When shards are, as soon as they have been reduced."""
AFTER_HEAD = BACKWARD[BACKWARD.index(Phase.backward_last) :]


def blocks(layers: int) -> dict[Phase, tuple[int, int]]:
    """Returns for each phase how many blocks await backward, and how many have been through it."""
    return {
        Phase.forward: (layers - 1, 0),
        Phase.loss: (layers, 0),
        Phase.backward_loss: (layers, 0),
        Phase.backward_head: (layers, 0),
        Phase.backward_last: (layers - 1, 0),
        Phase.reduce_last: (layers - 1, 0),
        Phase.backward_next: (max(0, layers - 2), min(1, layers - 1)),
        Phase.backward_second: (min(1, layers - 1), max(0, layers - 2)),
        Phase.backward_first: (0, layers - 1),
        Phase.reduce_block: (0, layers - 1),
        Phase.backward_embedding: (0, layers),
        Phase.reduce_rest: (0, layers),
    }


def line(what: str, size: int, phases: tuple[Phase, ...], formula: str, reason: str) -> Line:
    """Returns a line of as many bytes in each of its phases."""
    return Line(what, dict.fromkeys(phases, size), formula, reason)
