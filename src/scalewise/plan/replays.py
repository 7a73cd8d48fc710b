"""What the parts of a model do in a pass, each worked out once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.memory import Recompute
from scalewise.models.base import Model
from scalewise.models.fused import fused
from scalewise.models.tape import Pass, Tapes
from scalewise.plan.replay import Replay, replay

if TYPE_CHECKING:
    from scalewise.parallelism.holds import Holds
    from scalewise.run import Run

NOTHING = Replay(0, 0, 0, 0)


@lru_cache(maxsize=1024)
def tapes_of(model: Model, shape: Pass, again: bool = False) -> Tapes:
    """Returns the tapes of a model; the many layouts of a search share few shapes.

    ``again``: whether backward computes all of a block a second time.
    """
    found = model.tapes(shape)
    if not shape.compiled:
        return found
    start, block = (fused(tape, again=again) for tape in (found.start, found.block))
    return replace(found, start=start, block=block)


@lru_cache(maxsize=1024)
def of_block(
    model: Model,
    shape: Pass,
    recompute: Recompute,
    fresh: bool,
    offload: bool = False,
    stepped: float = -1,
) -> Replay:
    """Returns any block but the first of all."""
    block = tapes_of(model, shape, recompute is Recompute.full).block
    return replay(block, recompute, fresh=fresh, offload=offload, stepped=stepped)


@lru_cache(maxsize=1024)
def of_start(
    model: Model,
    shape: Pass,
    recompute: Recompute,
    fresh: bool,
    offload: bool = False,
    stepped: float = -1,
) -> Replay:
    """Returns the first block of all."""
    start = tapes_of(model, shape, recompute is Recompute.full).start
    return replay(start, recompute, fresh=fresh, offload=offload, stepped=stepped)


def offloaded(run: Run, holds: Holds) -> int:
    """Returns the bytes that one pass through each part of a rank leaves away from its device."""
    if not run.memory.offload:
        return 0
    return sum(
        of_block(run.model, holds.shape, recompute, fresh=True, offload=True).away
        for recompute in run.memory.of_parts(holds.parts)
    )


@lru_cache(maxsize=1024)
def of_ends(
    model: Model, shape: Pass, fresh: bool, stepped: float = -1
) -> tuple[Replay, Replay, Replay]:
    """Returns embedding, head and loss; a loss that is taken in pieces is in the head."""
    tapes = tapes_of(model, shape)
    ends = min(stepped, 0.0) if model.tied_weights else stepped  # then stepped after both
    return (
        replay(tapes.first, given=(), fresh=fresh, stepped=ends),
        replay(tapes.last, fresh=fresh, stepped=ends),
        replay(tapes.loss, fresh=fresh) if tapes.loss else NOTHING,
    )
