"""Memory entries of one rank of a pipeline: waiting micro-batches and communication buffers."""

from __future__ import annotations

from functools import lru_cache

from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import ModelConfig
from scalewise.models.op_graph import ForwardSpec, SavedOn
from scalewise.planner.activation_liveness import liveness_by_block, model_op_graphs
from scalewise.planner.memory_breakdown import (
    ALL_PHASES,
    BACKWARD,
    FORWARD_BACKWARD,
    EntryGroup,
    MemoryEntry,
    StepPhase,
    constant_entry,
    group_entries,
)
from scalewise.planner.rank_memory import PipelinePasses
from scalewise.planner.rank_step import PeakPoint, waiting_stages
from scalewise.planner.step_liveness import StepLiveness


@lru_cache(maxsize=16384)
def pipeline_entries(
    model: ModelConfig,
    memory: ActivationCheckpointing,
    passes: PipelinePasses,
    forward_spec: ForwardSpec,
    liveness: StepLiveness,
    saved_on: SavedOn,
    fresh_gradients: bool,
    step_scratch_ratio: float,
    peak_point: PeakPoint,
) -> EntryGroup:
    """Return the entries of a rank of a pipeline at a point of its schedule."""
    blocks = waiting_bytes = received = 0
    for stage, count in waiting_stages(passes, peak_point):
        parts = liveness_by_block(
            model, memory, (stage,), forward_spec, fresh_gradients, saved_on, step_scratch_ratio
        )
        blocks += count * len(parts)
        waiting_bytes += count * sum(part.saved_bytes for part in parts)
        received += count * (not stage.is_first)
    op_graphs, num_stages = model_op_graphs(model, forward_spec), len(passes.stages)
    embedding, head, loss = liveness.non_blocks
    residual_bytes = op_graphs.block.sizes[0]
    output_bytes = residual_bytes
    if passes.has_head and op_graphs.loss:
        output_bytes = op_graphs.loss.sizes[0]
    waiting_bytes += peak_point.waiting_passes * (op_graphs.shared_bytes + embedding.saved_bytes)
    if not memory.offload:  # then no saved tensor is in a communication buffer
        waiting_bytes -= residual_bytes * received
    if num_stages == 1:  # with several stages the last one runs backward at once
        waiting_bytes += peak_point.waiting_passes * (
            head.saved_bytes + loss.saved_bytes + output_bytes
        )
    else:
        waiting_bytes += peak_point.waiting_passes * residual_bytes
    num_passes = passes.num_pipeline_micro_batches * num_stages
    return group_entries(
        (
            constant_entry(
                "activations of other pieces",
                waiting_bytes,
                FORWARD_BACKWARD,
                f"activations of {blocks} blocks and more",
                f"up to {passes.in_flight} of {num_passes} forward passes wait for their backward",
            ),
            constant_entry(
                "output of the stage",
                output_bytes + (num_stages - 1) * residual_bytes,
                BACKWARD,
                "",
                "kept until its backward ends",
            ),
            _buffer_entry(passes, peak_point, residual_bytes, counts_inputs=not memory.offload),
        )
    )


def _buffer_entry(
    passes: PipelinePasses, peak_point: PeakPoint, residual_bytes: int, *, counts_inputs: bool
) -> MemoryEntry:
    """Return the entry of communication buffers.

    ``counts_inputs``: whether block activations already count one buffer of the running
    micro-batch: the input of its first block, next to the gradient that its last block receives.
    """
    num_stages = len(passes.stages)
    input_bytes = residual_bytes * sum(not part.is_first for part in passes.stages)
    returned_bytes = residual_bytes * sum(not part.is_last for part in passes.stages)
    buffer_bytes = (
        passes.num_stage_buffers * input_bytes + passes.num_gradient_buffers * returned_bytes
    )
    # The gradient that was sent last is still alive.
    sent_gradient_bytes = input_bytes // num_stages * (peak_point.finished_backwards > 0)
    buffers = dict.fromkeys(
        ALL_PHASES, buffer_bytes + sent_gradient_bytes - input_bytes * counts_inputs
    )
    buffers[StepPhase.backward_last] -= returned_bytes // num_stages
    buffers[StepPhase.optimizer] = buffer_bytes
    formula = (
        f"{passes.num_stage_buffers} x {input_bytes:,} B + "
        f"{passes.num_gradient_buffers} x {returned_bytes:,} B"
    )
    reason = "per micro-batch, one for activations and one for their gradients"
    return MemoryEntry("buffers between stages", buffers, formula, reason)
