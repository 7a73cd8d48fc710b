"""Cached simulations of the parts of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from scalewise.models.base import ModelConfig
from scalewise.models.build import build_op_graphs
from scalewise.models.compiler_fusion import fuse
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs, Recompute
from scalewise.planner.activation_liveness import PartLiveness, simulate_part
from scalewise.planner.rank_memory import RankMemory
from scalewise.run_config import RunConfig

EMPTY = PartLiveness(0, 0, 0, 0)
"""Memory of a part that the rank does not store."""


@lru_cache(maxsize=1024)
def model_op_graphs(
    model: ModelConfig, forward_spec: ForwardSpec, full_recompute: bool = False
) -> ModelOpGraphs:
    """Return the operator graphs of a model, compiled kernels fused.

    ``full_recompute``: whether backward recomputes whole blocks.
    """
    op_graphs = build_op_graphs(model, forward_spec)
    if not forward_spec.is_compiled:
        return op_graphs
    first_block, block = (
        fuse(graph, full_recompute=full_recompute)
        for graph in (op_graphs.first_block, op_graphs.block)
    )
    return replace(op_graphs, first_block=first_block, block=block)


@lru_cache(maxsize=1024)
def block_liveness(
    model: ModelConfig,
    forward_spec: ForwardSpec,
    recompute: Recompute,
    fresh_gradients: bool,
    offload: bool = False,
    step_scratch_ratio: float = -1,
) -> PartLiveness:
    """Return the memory of any block after the first."""
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
    """Return the memory of the first block."""
    first_block = model_op_graphs(model, forward_spec, recompute is Recompute.full).first_block
    return simulate_part(
        first_block,
        recompute,
        fresh_gradients=fresh_gradients,
        offload=offload,
        step_scratch_ratio=step_scratch_ratio,
    )


def offloaded_bytes(run: RunConfig, rank_memory: RankMemory) -> int:
    """Return the offloaded bytes of one forward pass through all stages of a rank."""
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
    """Return the memory of embedding, head and loss; a chunked loss counts as part of the head."""
    op_graphs = model_op_graphs(model, forward_spec)
    # A tied weight is stepped after both its gradients are summed.
    ratio = min(step_scratch_ratio, 0.0) if model.tied_weights else step_scratch_ratio
    return (
        simulate_part(
            op_graphs.embedding,
            inputs=(),
            fresh_gradients=fresh_gradients,
            step_scratch_ratio=ratio,
        ),
        simulate_part(op_graphs.head, fresh_gradients=fresh_gradients, step_scratch_ratio=ratio),
        simulate_part(op_graphs.loss, fresh_gradients=fresh_gradients) if op_graphs.loss else EMPTY,
    )
