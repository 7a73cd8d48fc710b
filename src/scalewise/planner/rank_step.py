"""One rank at a point of a step at which its memory may peak: pipeline state and liveness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat

from scalewise.models.base import StageSlice, Weight, WeightGroup
from scalewise.models.op_graph import SavedOn
from scalewise.planner.activation_liveness import (
    EMPTY,
    PartLiveness,
    liveness_by_block,
    memory_of_saved_tensors,
    model_op_graphs,
)
from scalewise.planner.rank_memory import RankMemory
from scalewise.planner.step_liveness import step_liveness
from scalewise.planner.weight_sizes import shard_elements
from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class PeakPoint:
    """State of a rank right before a backward pass through one of its stages.

    Forward passes are counted per stage.
    """

    waiting_passes: int = 0
    """Forward passes that wait for their backward, without the one that runs next."""
    finished_backwards: int = 0
    """Backward passes that have ended."""
    follows_forward: bool = True
    """Whether the last pass of the rank was a forward."""
    ends_schedule: bool = False
    """Whether the backward is the last one of the step."""
    keeps_unsharded: bool = False
    """Whether FSDP keeps parameters, and gradients that it reduces once per step, unsharded after
    this backward: in each micro-batch but the last."""


def iter_peak_points(rank_memory: RankMemory) -> Iterator[PeakPoint]:
    """Yield the points of a step at which the memory of a rank may peak.

    Without a pipeline this is the backward pass of the last micro-batch, and that of an earlier one
    if it leaves parameters unsharded. In a pipeline there are up to four: the first backward, the
    last backward that follows a forward (gradients exist by then), the backward after it, for which
    no parameters were resharded, and the last backward.
    """
    num_stages = len(rank_memory.stages)
    waiting_passes, finished_backwards = (
        rank_memory.in_flight - num_stages,
        rank_memory.num_pipeline_micro_batches * num_stages - rank_memory.in_flight,
    )
    yield PeakPoint(waiting_passes)
    if rank_memory.fsdp is not None and rank_memory.fsdp.keeps_between_passes:
        yield PeakPoint(waiting_passes, keeps_unsharded=True)
    if rank_memory.num_pipeline_micro_batches == 1:
        return
    if finished_backwards:
        yield PeakPoint(waiting_passes, finished_backwards, ends_schedule=not waiting_passes)
    if waiting_passes:
        yield PeakPoint(waiting_passes - 1, finished_backwards + 1, follows_forward=False)
        yield PeakPoint(
            0, finished_backwards + waiting_passes, follows_forward=False, ends_schedule=True
        )


def iter_waiting_parts(rank_memory: RankMemory, peak_point: PeakPoint) -> Iterator[StageSlice]:
    """Yield the stage of each waiting forward pass, except one pass per stage.

    A rank runs as many forward passes through a stage as there are pipeline ranks, then
    continues with its next stage.
    """
    stages, num_ranks = rank_memory.stages, rank_memory.pipeline_ranks
    pass_indices = range(peak_point.waiting_passes + len(stages))
    passes_by_stage = Counter(index // num_ranks % len(stages) for index in pass_indices)
    for stage, count in passes_by_stage.items():
        yield from repeat(stages[stage], count - 1)


@lru_cache(maxsize=256)
def _head_weights(weights: tuple[Weight, ...]) -> WeightGroup:
    """Return the weights that are used after the blocks."""
    return WeightGroup(w for w in weights if w.role not in ("embedding", "position"))


class RankStep:
    """Gradients and liveness of one rank at one point of a step.

    Args:
        run: Run that trains.
        rank_memory: Partition of the rank.
        peak_point: Point of the pipeline schedule.
    """

    def __init__(self, run: RunConfig, rank_memory: RankMemory, peak_point: PeakPoint) -> None:
        self.run, self.rank_memory, self.peak_point = run, rank_memory, peak_point
        fsdp = rank_memory.fsdp
        # The schedule of a pipeline neither reduces gradients nor reshards parameters in backward.
        self.reduces_after_schedule = fsdp is not None and rank_memory.pipeline_ranks > 1
        accumulates = run.accumulation > (2 if peak_point.keeps_unsharded else 1)
        if fsdp is not None and peak_point.finished_backwards:
            keeps_unsharded = fsdp.keeps_unsharded or not peak_point.follows_forward
            fsdp = replace(fsdp, keeps_unsharded=keeps_unsharded, has_unsharded_gradients=True)
        elif peak_point.finished_backwards:
            accumulates = True
        self.fsdp = fsdp
        has_unsharded_gradients = fsdp is not None and fsdp.has_unsharded_gradients
        self.gradients_persist = (
            accumulates and (self.reduces_after_schedule or not has_unsharded_gradients)
        ) or rank_memory.has_persistent_buckets
        adds_in_place = (
            has_unsharded_gradients
            and fsdp is not None
            and fsdp.reduced_element_bytes == rank_memory.forward_spec.gradient_element_bytes
        )
        fresh_gradients = not adds_in_place if fsdp is not None else not self.gradients_persist
        # Blocks of several kinds are measured together, with a gradient that waits for the other.
        self.has_tied_weights = (
            rank_memory.has_embedding
            and rank_memory.has_head
            and bool(run.model.tied_weights)
            and run.model.has_equal_blocks
        )
        self.saves_on_host = memory_of_saved_tensors(run) is SavedOn.host
        self.op_graphs = model_op_graphs(run.model, rank_memory.forward_spec)
        self.fresh_gradients, self.step_scratch_ratio = (
            fresh_gradients,
            self._compute_step_scratch_ratio(),
        )
        self.liveness = step_liveness(
            run.model,
            run.memory,
            rank_memory.stages,
            rank_memory.forward_spec,
            fresh_gradients,
            memory_of_saved_tensors(run),
            self.step_scratch_ratio,
        )
        self.blocks_by_phase = self.liveness.blocks_by_phase
        embedding, head, loss = self.liveness.non_blocks
        self.embedding_liveness = embedding if rank_memory.has_embedding else EMPTY
        self.head_liveness, self.loss_liveness = (
            (head, loss) if rank_memory.has_head else (EMPTY, EMPTY)
        )

    def simulate_blocks(self, stages: Sequence[StageSlice]) -> tuple[PartLiveness, ...]:
        """Simulate the blocks of ``stages``, in order."""
        run = self.run
        return liveness_by_block(
            run.model,
            run.memory,
            tuple(stages),
            self.rank_memory.forward_spec,
            self.fresh_gradients,
            memory_of_saved_tensors(run),
            self.step_scratch_ratio,
        )

    def _compute_step_scratch_ratio(self) -> float:
        """Return the temporary bytes of an optimizer step in backward per byte of gradient, or -1.

        -1: the optimizer steps after backward, or steps shards, which are separate entries.
        """
        if not self.run.optimizer.in_backward or self.fsdp is not None:
            return -1.0
        if not self.rank_memory.forward_spec.on_cpu:
            return 0.0  # kernels of CUDA optimizers are fused
        optimizer, element_bytes = self.run.optimizer, self.gradient_element_bytes
        weights = [
            w
            for w in (*self.rank_memory.block_weights, *self.rank_memory.other_weights)
            if w.trainable
        ]
        largest = max(weights, key=lambda weight: weight.numel)
        return optimizer.scratch_bytes(largest, 1, element_bytes) / (largest.numel * element_bytes)

    @property
    def last_gather_bytes(self) -> int:
        """Size of FSDP2's last all-gather buffer in forward, which it keeps until forward ends."""
        if self.fsdp is None or not self.rank_memory.has_head or not self.gathers_in_forward:
            return 0
        # A pipeline keeps the head gathered after its first micro-batch.
        head = () if self.peak_point.waiting_passes else self.fsdp.groups.head
        return self.fsdp.gathered_bytes(head or self.rank_memory.block_weights)

    @property
    def gathers_in_forward(self) -> bool:
        """Whether forward gathers blocks; not if they are still gathered from an earlier one."""
        point = self.peak_point
        if self.fsdp is not None and self.fsdp.keeps_between_passes:
            return False
        keeps_unsharded = self.fsdp is not None and self.fsdp.keeps_unsharded
        return not point.finished_backwards and not (keeps_unsharded and point.waiting_passes)

    @property
    def head_numel(self) -> int:
        """Trained parameter elements after the blocks."""
        return shard_elements(_head_weights(self.rank_memory.other_weights), trained=True)

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes per element of a gradient that waits for the optimizer step."""
        return self.run.precision.parameters.bytes
