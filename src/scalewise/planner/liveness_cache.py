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
def model_op_graphs(
    model: ModelConfig, forward_spec: ForwardSpec, full_recompute: bool = False
) -> ModelOpGraphs:
    """Returns the tapes of a model; the many layouts of a search share few shapes.

    ``full_recompute``: whether backward computes all of a block a second time.
    """
    found = model.build_op_graphs(forward_spec)
    if not forward_spec.is_compiled:
        return found
    start, block = (
        fuse(graph, full_recompute=full_recompute) for graph in (found.first_block, found.block)
    )
    return replace(found, first_block=start, block=block)


@lru_cache(maxsize=1024)
def block_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    recompute: Recompute,
    fresh_gradients: bool,
    offload: bool = False,
    step_scratch_ratio: float = -1,
) -> PartLiveness:
    """Returns any block but the first of all."""
    block = model_op_graphs(model, forward_spec, recompute is Recompute.full).block
    return simulate_part(
        block,
        recompute,
        fresh_gradients=fresh_gradients,
        offload=offload,
        step_scratch_ratio=step_scratch_ratio,
    )


@lru_cache(maxsize=1024)
def first_block_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    recompute: Recompute,
    fresh_gradients: bool,
    offload: bool = False,
    step_scratch_ratio: float = -1,
) -> PartLiveness:
    """Returns the first block of all."""
    start = model_op_graphs(model, forward_spec, recompute is Recompute.full).first_block
    return simulate_part(
        start,
        recompute,
        fresh_gradients=fresh_gradients,
        offload=offload,
        step_scratch_ratio=step_scratch_ratio,
    )


def offloaded_bytes(run: RunConfig, rank_memory: RankMemory) -> int:
    """Returns the bytes that one pass through each part of a rank leaves away from its device."""
    if not run.memory.offload:
        return 0
    return sum(
        block_liveness(
            run.model, rank_memory.forward_spec, recompute, fresh_gradients=True, offload=True
        ).offloaded_bytes
        for recompute in run.memory.recompute_per_layer(rank_memory.stages)
    )


@lru_cache(maxsize=1024)
def ends_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    fresh_gradients: bool,
    step_scratch_ratio: float = -1,
) -> tuple[PartLiveness, PartLiveness, PartLiveness]:
    """Returns embedding, head and loss; a loss that is taken in pieces is in the head."""
    op_graphs = model_op_graphs(model, forward_spec)
    ends = (
        min(step_scratch_ratio, 0.0) if model.tied_weights else step_scratch_ratio
    )  # then stepped after both
    return (
        simulate_part(
            op_graphs.embedding, inputs=(), fresh_gradients=fresh_gradients, step_scratch_ratio=ends
        ),
        simulate_part(op_graphs.head, fresh_gradients=fresh_gradients, step_scratch_ratio=ends),
        simulate_part(op_graphs.loss, fresh_gradients=fresh_gradients)
        if op_graphs.loss
        else NOTHING,
    )
