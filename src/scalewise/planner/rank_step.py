"""One rank at a point of a step at which its memory may peak: pipeline state and gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from scalewise.cached_hash import cache_hash
from scalewise.callback_config import averaging_callback
from scalewise.hardware import Hardware
from scalewise.models.base import ModelConfig, StageSlice, Weight, WeightGroup
from scalewise.models.op_graph import ForwardSpec
from scalewise.optimizers import OptimizerConfig
from scalewise.planner.rank_memory import PipelinePasses, RankMemory
from scalewise.planner.rank_states import RankStates
from scalewise.planner.weight_sizes import shard_elements
from scalewise.precision import Precision
from scalewise.run_config import RunConfig


@cache_hash
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

    @cached_property
    def without_counts(self) -> PeakPoint:
        """Point with counts of 0 and 1 only, which is all that model states depend on."""
        return replace(
            self,
            waiting_passes=min(1, self.waiting_passes),
            finished_backwards=min(1, self.finished_backwards),
        )


def peak_points(rank_memory: RankMemory) -> tuple[PeakPoint, ...]:
    """Return the points of a step at which the memory of a rank may peak.

    Without a pipeline this is the backward pass of the last micro-batch, and that of an earlier one
    if it leaves parameters unsharded. In a pipeline there are up to four: the first backward, the
    last backward that follows a forward (gradients exist by then), the backward after it, for which
    no parameters were resharded, and the last backward.
    """
    keeps_between_passes = rank_memory.fsdp is not None and rank_memory.fsdp.keeps_between_passes
    return _peak_points(
        len(rank_memory.stages),
        rank_memory.in_flight,
        rank_memory.num_pipeline_micro_batches,
        keeps_between_passes,
    )


@lru_cache(maxsize=1024)
def _peak_points(
    num_stages: int, in_flight: int, num_micro_batches: int, keeps_between_passes: bool
) -> tuple[PeakPoint, ...]:
    waiting_passes, finished_backwards = (
        in_flight - num_stages,
        num_micro_batches * num_stages - in_flight,
    )
    points = [PeakPoint(waiting_passes)]
    if keeps_between_passes:
        points.append(PeakPoint(waiting_passes, keeps_unsharded=True))
    if num_micro_batches == 1:
        return tuple(points)
    if finished_backwards:
        ends_schedule = not waiting_passes
        points.append(PeakPoint(waiting_passes, finished_backwards, ends_schedule=ends_schedule))
    if waiting_passes:
        finished = finished_backwards + waiting_passes
        points += [
            PeakPoint(waiting_passes - 1, finished_backwards + 1, follows_forward=False),
            PeakPoint(0, finished, follows_forward=False, ends_schedule=True),
        ]
    return tuple(points)


@lru_cache(maxsize=4096)
def waiting_stages(
    passes: PipelinePasses, peak_point: PeakPoint
) -> tuple[tuple[StageSlice, int], ...]:
    """Return the stages of waiting forward passes with their number, except one pass per stage.

    A rank runs as many forward passes through a stage as there are pipeline ranks, then
    continues with its next stage.
    """
    stages, num_ranks = passes.stages, passes.pipeline_ranks
    pass_indices = range(peak_point.waiting_passes + len(stages))
    passes_by_stage = Counter(index // num_ranks % len(stages) for index in pass_indices)
    return tuple((stages[stage], count - 1) for stage, count in passes_by_stage.items())


@lru_cache(maxsize=256)
def _head_weights(weights: tuple[Weight, ...]) -> WeightGroup:
    """Return the weights that are used after the blocks."""
    return WeightGroup(w for w in weights if w.role not in ("embedding", "position"))


@cache_hash
@dataclass(frozen=True)
class StateConfigs:
    """Configs and formats that decide the memory of model states, besides their partition."""

    model: ModelConfig
    """Model."""
    precision: Precision
    """Data types of parameters and matmuls."""
    optimizer: OptimizerConfig
    """Optimizer."""
    hardware: Hardware
    """Devices."""
    has_average: bool
    """Whether a callback averages the weights."""
    accumulation: int
    """Number of micro-batches of a step; 3 stands for more."""
    on_cpu: bool
    """Whether torch's CPU operators run."""
    rope_element_bytes: int
    """Bytes per element of the rotary table."""
    gradient_element_bytes: int
    """Bytes per element of weights and of their gradients in a forward and backward pass."""
    tensor_ranks: int
    """Tensor-parallel degree."""


def state_configs(run: RunConfig, forward_spec: ForwardSpec) -> StateConfigs:
    """Return what the memory of model states depends on."""
    return StateConfigs(
        run.model,
        run.precision,
        run.optimizer,
        run.hardware,
        averaging_callback(run.callbacks) is not None,
        min(run.accumulation, 3),
        forward_spec.on_cpu,
        forward_spec.rope_element_bytes,
        forward_spec.gradient_element_bytes,
        forward_spec.tensor_ranks,
    )


class RankStep:
    """Gradients of one rank at one point of a step; independent of the size of a micro-batch.

    Args:
        configs: Configs of the run.
        states: Model states of the rank.
        peak_point: Point of the pipeline schedule.
    """

    def __init__(self, configs: StateConfigs, states: RankStates, peak_point: PeakPoint) -> None:
        self.configs, self.states, self.peak_point = configs, states, peak_point
        fsdp = states.fsdp
        # The schedule of a pipeline neither reduces gradients nor reshards parameters in backward.
        self.reduces_after_schedule = fsdp is not None and states.pipeline_ranks > 1
        accumulates = configs.accumulation > (2 if peak_point.keeps_unsharded else 1)
        if fsdp is not None and peak_point.finished_backwards:
            keeps_unsharded = fsdp.keeps_unsharded or not peak_point.follows_forward
            fsdp = replace(fsdp, keeps_unsharded=keeps_unsharded, has_unsharded_gradients=True)
        elif peak_point.finished_backwards:
            accumulates = True
        self.fsdp = fsdp
        has_unsharded_gradients = fsdp is not None and fsdp.has_unsharded_gradients
        self.gradients_persist = (
            accumulates and (self.reduces_after_schedule or not has_unsharded_gradients)
        ) or states.has_persistent_buckets
        adds_in_place = (
            has_unsharded_gradients
            and fsdp is not None
            and fsdp.reduced_element_bytes == configs.gradient_element_bytes
        )
        self.fresh_gradients = not adds_in_place if fsdp is not None else not self.gradients_persist
        # Blocks of several kinds are measured together, with a gradient that waits for the other.
        self.has_tied_weights = (
            any(stage.is_first and stage.is_last for stage in states.stages)
            and bool(configs.model.tied_weights)
            and configs.model.has_equal_blocks
        )
        self.step_scratch_ratio = self._compute_step_scratch_ratio()

    def _compute_step_scratch_ratio(self) -> float:
        """Return the temporary bytes of an optimizer step in backward per byte of gradient, or -1.

        -1: the optimizer steps after backward, or steps shards, which are separate entries.
        """
        optimizer, element_bytes = self.configs.optimizer, self.gradient_element_bytes
        if not optimizer.in_backward or self.fsdp is not None:
            return -1.0
        if not self.configs.on_cpu:
            return 0.0  # kernels of CUDA optimizers are fused
        weights = (*self.states.block_weights, *self.states.other_weights)
        largest = max((w for w in weights if w.trainable), key=lambda weight: weight.numel)
        return optimizer.scratch_bytes(largest, 1, element_bytes) / (largest.numel * element_bytes)

    @cached_property
    def last_gather_bytes(self) -> int:
        """Size of FSDP2's last all-gather buffer in forward, which it keeps until forward ends."""
        if self.fsdp is None or not self.states.has_head or not self.gathers_in_forward:
            return 0
        # A pipeline keeps the head gathered after its first micro-batch.
        head = () if self.peak_point.waiting_passes else self.fsdp.groups.head
        return self.fsdp.all_gather_bytes(head or self.states.block_weights)

    @cached_property
    def gathers_in_forward(self) -> bool:
        """Whether forward fills all-gather buffers: one rank copies its parameters without one.

        Not if they are still gathered from an earlier forward.
        """
        point = self.peak_point
        if self.fsdp is not None and (self.fsdp.keeps_between_passes or self.fsdp.num_shards == 1):
            return False
        keeps_unsharded = self.fsdp is not None and self.fsdp.keeps_unsharded
        return not point.finished_backwards and not (keeps_unsharded and point.waiting_passes)

    @cached_property
    def head_numel(self) -> int:
        """Trained parameter elements after the blocks."""
        return shard_elements(_head_weights(self.states.other_weights), trained=True)

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes per element of a gradient that waits for the optimizer step."""
        zero = self.states.zero
        return zero.gradient_element_bytes if zero else self.configs.precision.parameters.bytes

    @cached_property
    def gathered_block_bytes(self) -> int:
        """Size of the gathered parameters of a block with FSDP, in bytes."""
        return self.fsdp.gathered_bytes(self.states.block_weights) if self.fsdp else 0

    @cached_property
    def gather_buffer_bytes(self) -> int:
        """Size of the output of the all-gather of a block with FSDP, in bytes."""
        return self.fsdp.all_gather_bytes(self.states.block_weights) if self.fsdp else 0

    @cached_property
    def gathers_in_schedule(self) -> bool:
        """Whether backward gathers parameters in a pipeline, which keeps them unsharded."""
        fsdp = self.states.fsdp
        gathers = fsdp is not None and not fsdp.keeps_unsharded and self.peak_point.follows_forward
        return self.reduces_after_schedule and gathers

    @property
    def accumulates_unsharded(self) -> bool:
        """Whether the backward adds to unsharded gradients and reduces none."""
        unsharded = self.fsdp is not None and self.fsdp.has_unsharded_gradients
        return unsharded and self.peak_point.keeps_unsharded


@lru_cache(maxsize=4096)
def rank_step(configs: StateConfigs, states: RankStates, peak_point: PeakPoint) -> RankStep:
    """Return a rank at a point of a step; equal ones are one object."""
    return RankStep(configs, states, peak_point)
