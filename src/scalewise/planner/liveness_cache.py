"""What the parts of a model do in a pass, each worked out once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.models.base import ModelConfig
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs
from scalewise.planner.activation_liveness import PartLiveness, simulate_part

if TYPE_CHECKING:
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig

NOTHING = PartLiveness(0, 0, 0, 0)


@lru_cache(maxsize=1024)
def model_op_graphs(model: ModelConfig, shape: ForwardSpec, again: bool = False) -> ModelOpGraphs:
    """Returns the tapes of a model; the many layouts of a search share few shapes.

    ``again``: whether backward computes all of a block a second time.
    """
    found = model.tapes(shape)
    if not shape.compiled:
        return found
    start, block = (fuse(tape, again=again) for tape in (found.start, found.block))
    return replace(found, start=start, block=block)


@lru_cache(maxsize=1024)
def block_liveness(
    model: ModelConfig,
    shape: ForwardSpec,
    recompute: Recompute,
    fresh: bool,
    offload: bool = False,
    stepped: float = -1,
) -> PartLiveness:
    """Returns any block but the first of all."""
    block = model_op_graphs(model, shape, recompute is Recompute.full).block
    return simulate_part(block, recompute, fresh=fresh, offload=offload, stepped=stepped)


@lru_cache(maxsize=1024)
def first_block_liveness(
    model: ModelConfig,
    shape: ForwardSpec,
    recompute: Recompute,
    fresh: bool,
    offload: bool = False,
    stepped: float = -1,
) -> PartLiveness:
    """Returns the first block of all."""
    start = model_op_graphs(model, shape, recompute is Recompute.full).start
    return simulate_part(start, recompute, fresh=fresh, offload=offload, stepped=stepped)


def offloaded_bytes(run: RunConfig, holds: RankMemory) -> int:
    """Returns the bytes that one pass through each part of a rank leaves away from its device."""
    if not run.memory.offload:
        return 0
    return sum(
        block_liveness(run.model, holds.shape, recompute, fresh=True, offload=True).away
        for recompute in run.memory.of_parts(holds.parts)
    )


@lru_cache(maxsize=1024)
def ends_liveness(
    model: ModelConfig, shape: ForwardSpec, fresh: bool, stepped: float = -1
) -> tuple[PartLiveness, PartLiveness, PartLiveness]:
    """Returns embedding, head and loss; a loss that is taken in pieces is in the head."""
    tapes = model_op_graphs(model, shape)
    ends = min(stepped, 0.0) if model.tied_weights else stepped  # then stepped after both
    return (
        simulate_part(tapes.first, given=(), fresh=fresh, stepped=ends),
        simulate_part(tapes.last, fresh=fresh, stepped=ends),
        simulate_part(tapes.loss, fresh=fresh) if tapes.loss else NOTHING,
    )
