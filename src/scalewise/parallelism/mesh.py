"""N-dimensional parallelism over a named mesh: pipeline, replication, sharding, context, tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import gcd, prod
from typing import Any, Self

from scalewise.errors import ConfigIssue
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig
from scalewise.registry import register_option

AXES = ("pipeline", "replicate", "shards", "context", "tensor")
"""Mesh axes, outermost first; the last axis communicates most and has adjacent ranks."""

EXPERT_AXES = ("pipeline", "replicate", "expert_shards", "expert", "tensor")
"""Axes of the mesh of routed experts: ``shards`` x ``context`` is factored in another way."""

AUTO = "auto"

Size = int | str


class ContextAttention(StrEnum):
    """Communication of attention across the context axis."""

    ulysses = "ulysses"
    """All-to-all: each rank gets whole sequences of some heads (Jacobs et al., 2023)."""
    gather = "gather"
    """All-gather of keys and values: each rank attends with its own queries (Llama 3)."""


class ShardedState(StrEnum):
    """Model state that the ``shards`` and ``context`` axes partition: the ZeRO stage."""

    optimizer = "optimizer"
    """ZeRO-1: optimizer state and master weights, as in the distributed optimizer of Megatron-LM.
    Parameters are gathered once per step; gradients are reduced after the last micro-batch."""
    gradients = "gradients"
    """ZeRO-2: also gradients, which are reduced after each micro-batch."""
    parameters = "parameters"
    """ZeRO-3: also parameters, which are gathered for each forward and backward of a block."""


class PipelineSchedule(StrEnum):
    """Pipeline schedule; values are torch's names."""

    gpipe = "GPipe"
    """All forward passes, then all backward passes."""
    one_f_one_b = "1F1B"
    """One forward, one backward alternately: fewer activations in flight."""
    interleaved_1f1b = "Interleaved1F1B"
    """1F1B with several stages per rank: smaller bubble."""
    interleaved_zero_bubble = "InterleavedZeroBubble"
    """Interleaved, with weight gradients computed in the bubble."""
    zbv_zero_bubble = "ZBVZeroBubble"
    """Two stages per rank in a V, with weight gradients computed in the bubble."""

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank stores several stages."""
        return self not in (PipelineSchedule.gpipe, PipelineSchedule.one_f_one_b)

    @property
    def splits_backward(self) -> bool:
        """Whether backward computes input and weight gradients separately (Qi et al., 2023)."""
        kinds = (PipelineSchedule.interleaved_zero_bubble, PipelineSchedule.zbv_zero_bubble)
        return self in kinds

    @property
    def is_v_shaped(self) -> bool:
        """Whether rank 0 stores the first and the last stage."""
        return self is PipelineSchedule.zbv_zero_bubble


@register_option("parallelism", "mesh")
@dataclass(frozen=True)
class MeshConfig(ParallelismConfig):
    """N-dimensional parallelism: any product of five mesh axes, with experts on ranks
    of two of them. One size may be ``auto``."""

    implementation = "scalewise.strategies.nd_parallel"
    imports = (implementation,)

    pipeline: Size = 1
    """Pipeline parallel size, in ranks; each stores consecutive layers. auto: all remaining
    devices."""
    replicate: Size = 1
    """Replication size (dp_replicate), in ranks; each stores a copy of the sharded model. auto:
    all remaining devices."""
    shards: Size = 1
    """Sharding size (dp_shard, FSDP2), in ranks; they partition parameters, gradients and
    optimizer state. auto: the launched ranks, else the devices of the hardware profile, else the
    visible GPUs, divided by the sizes of the other axes and rounded down; else 2, on the CPU."""
    context: Size = 1
    """Context parallel size, in ranks; they partition each sequence, and parameters are sharded
    over them too. auto: all remaining devices."""
    tensor: Size = 1
    """Tensor parallel size, in ranks; they partition every matrix (Megatron-LM, 2019). auto: all
    remaining devices."""
    expert: int = 1
    """Expert parallel size, in ranks; each stores some experts of ``model.experts`` and receives
    their tokens by all-to-all. They are ranks of ``shards`` x ``context``, whose product it
    divides: other weights stay sharded over all of these (GShard, Lepikhin et al., 2020). With
    ``tensor``, a rank stores a part of the hidden features of each of its experts."""
    shard: ShardedState = ShardedState.parameters
    """Model state that stays partitioned within a step: ``optimizer`` (ZeRO-1), ``gradients``
    (ZeRO-2) or ``parameters`` (ZeRO-3)."""
    reshard_after_forward: bool = True
    """Whether gathered parameters are freed after a block's forward, or kept until its backward;
    ``shard=optimizer`` and ``shard=gradients`` keep them."""
    prefetch: int = 1
    """Prefetch distance of parameter gathering, in blocks; 0: a block is gathered when it runs."""
    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer state are stored in host memory."""
    reduce_each_micro_batch: bool = True
    """Whether gradients are reduced after each micro-batch, or stay unsharded until the last, as
    with ``shard=optimizer``. A pipeline gathers parameters and reduces gradients once per run of
    its schedule, whatever these options say."""
    sequence_parallel: bool = True
    """Whether activations outside of tensor-parallel layers are sharded along the sequence."""
    loss_parallel: bool = True
    """Whether the loss is computed from logits sharded along the vocabulary."""
    async_tensor: bool = False
    """Whether matmuls overlap with tensor-parallel communication; not implemented, so that only
    false is accepted."""
    attention: ContextAttention = ContextAttention.ulysses
    """Communication of attention across the context axis."""
    balanced: bool = True
    """Whether each context rank takes a chunk from both ends of a sequence, which balances causal
    attention."""
    pipeline_schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    """Order in which pipeline stages process micro-batches."""
    stages_per_rank: int | None = None
    """Number of stages per pipeline rank; null: two for interleaved schedules, else one."""
    pipeline_micro_batches: int | None = None
    """Number of pipeline micro-batches per micro-batch; null: one per stage."""
    one_rank_mesh: bool = False
    """Whether a mesh of one rank applies FSDP2 over a process group of one rank, which tests FSDP2
    on one device; false: one rank trains without FSDP2."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Resolved size of each axis, outermost first."""
        return {axis: size for axis in AXES if isinstance(size := getattr(self, axis), int)}

    @property
    def parameter_shards(self) -> int:
        """``shards`` x ``context``: ranks that partition each parameter."""
        return self.sizes.get("shards", 1) * self.sizes.get("context", 1)

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Size of each axis of the mesh of routed experts, outermost first."""
        expert_shards = self.parameter_shards // self.expert
        sizes = self.sizes | {"expert_shards": expert_shards, "expert": self.expert}
        return {axis: sizes[axis] for axis in EXPERT_AXES}

    @property
    def world_size(self) -> int:
        """Product of the axis sizes."""
        return prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """``replicate`` x ``shards``."""
        return self.sizes.get("replicate", 1) * self.sizes.get("shards", 1)

    @property
    def uses_process_group(self) -> bool:
        """Whether there are several ranks, or a mesh of one rank."""
        return self.world_size > 1 or self.one_rank_mesh

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 is applied: parameters are sharded or replicated over ranks."""
        return self.gradient_averaging_size > 1 or (self.world_size == 1 and self.one_rank_mesh)

    @property
    def gathers_once(self) -> bool:
        """Whether parameters stay gathered for all micro-batches of a step."""
        return self.shard is not ShardedState.parameters

    @property
    def frees_after_forward(self) -> bool:
        """Whether the gathered parameters of a block are freed after its forward."""
        return self.reshard_after_forward and not self.gathers_once

    @property
    def delays_reduction(self) -> bool:
        """Whether gradients stay unsharded until the last micro-batch.

        A pipeline reduces them after each run of its schedule.
        """
        is_delayed = self.shard is ShardedState.optimizer or not self.reduce_each_micro_batch
        return is_delayed and self.sizes["pipeline"] == 1

    def data_parallel_rank(self, rank: int) -> int:
        """Return the index of a rank along ``replicate`` and ``shards``."""
        inner = self.sizes.get("context", 1) * self.sizes.get("tensor", 1)
        return rank // inner % self.data_parallel_size

    def dropout_rank(self, rank: int) -> int:
        """Return the index of a rank on all axes but ``tensor``, whose ranks share activations."""
        return rank // self.sizes.get("tensor", 1)

    @property
    def gradient_averaging_size(self) -> int:
        """``replicate`` x ``shards`` x ``context``."""
        return self.data_parallel_size * self.sizes.get("context", 1)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.sizes.get("pipeline", 1) * self.resolved_stages_per_rank

    @property
    def resolved_stages_per_rank(self) -> int:
        """Number of stages per pipeline rank."""
        return self.stages_per_rank or (2 if self.pipeline_schedule.is_interleaved else 1)

    @property
    def num_pipeline_micro_batches(self) -> int:
        """Number of pipeline micro-batches per micro-batch."""
        return self.pipeline_micro_batches or self.num_stages

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes the gradients of inputs and of weights apart."""
        return self.sizes.get("pipeline", 1) > 1 and self.pipeline_schedule.splits_backward

    @property
    def supports_compile(self) -> bool:
        """Whether backward is not split: compiled code computes all gradients at once."""
        return not self.splits_backward

    def resolve(self, devices: int | None) -> Self:
        """Return the config with the ``auto`` size filled in."""
        open_axes = [axis for axis in AXES if getattr(self, axis) == AUTO]
        if len(open_axes) != 1:
            return self
        other_ranks = prod(self.sizes.values())
        size = DEFAULT_CPU_RANKS if devices is None else max(1, devices // max(1, other_ranks))
        sizes: dict[str, Any] = {open_axes[0]: size}
        return replace(self, **sizes)

    def shrink(self) -> Self:
        """Return the config with at most two ranks along each axis."""
        sizes: dict[str, Any] = {axis: min(size, 2) for axis, size in self.sizes.items()}
        return replace(self, **sizes, expert=min(self.expert, 2))

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield a config issue for each invalid size and for an invalid schedule."""
        open_axes = [axis for axis in AXES if getattr(self, axis) == AUTO]
        for axis in open_axes[1:]:
            reason = f"only one size may be auto, and {open_axes[0]} is"
            yield ConfigIssue(f"parallelism.{axis}", AUTO, reason, f"set parallelism.{axis}=2")
        for axis in AXES:
            size = getattr(self, axis)
            if size != AUTO and not (isinstance(size, int) and size >= 1):
                yield ConfigIssue(f"parallelism.{axis}", size, "must be 1 or more, or auto")
        if self.expert < 1:
            yield ConfigIssue("parallelism.expert", self.expert, "must be 1 or more")
        elif not open_axes and self.parameter_shards % self.expert:
            reason = f"does not divide shards x context, which is {self.parameter_shards}"
            divisor = gcd(self.parameter_shards, self.expert)
            fix = f"set parallelism.expert={divisor}, or parallelism.shards={self.expert}"
            yield ConfigIssue("parallelism.expert", self.expert, reason, fix)
        if self.one_rank_mesh and not open_axes and self.world_size > 1:
            reason = f"the mesh has {self.world_size} ranks"
            fix = "set parallelism.one_rank_mesh=false"
            yield ConfigIssue("parallelism.one_rank_mesh", True, reason, fix)
        has_shards = (self.shards, self.context) != (1, 1)
        if self.gathers_once and not has_shards and not self.one_rank_mesh:
            reason = "no axis partitions the model state"
            fix = "set parallelism.shards=N, or parallelism.shard=parameters"
            yield ConfigIssue("parallelism.shard", self.shard.value, reason, fix)
        if self.prefetch < 0:
            yield ConfigIssue("parallelism.prefetch", self.prefetch, "must be 0 or more")
        for key in ("stages_per_rank", "pipeline_micro_batches"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield ConfigIssue(f"parallelism.{key}", value, "must be 1 or more, or null")
        schedule, num_stages = self.pipeline_schedule, self.resolved_stages_per_rank
        if (
            (num_stages != 2)
            if schedule.is_v_shaped
            else (num_stages > 1) != schedule.is_interleaved
        ):
            required = (
                "2" if schedule.is_v_shaped else "2 or more" if schedule.is_interleaved else "1"
            )
            reason = f"{schedule.name} requires {required} stage{'s' * (required != '1')} per rank"
            fix = "set parallelism.stages_per_rank=null"
            yield ConfigIssue("parallelism.stages_per_rank", num_stages, reason, fix)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether a pipeline accumulates micro-batches, or shards are copied to the host."""
        return self.sizes["pipeline"] > 1 or self.cpu_offload

    @property
    def backward_follows_forward(self) -> bool:
        """Whether there is no pipeline, whose stages have waiting forward passes."""
        return self.sizes["pipeline"] == 1

    @property
    def shards_parameters(self) -> bool:
        """Whether sharding or tensor parallelism leaves a rank a shard of each matrix."""
        return self.parameter_shards * self.sizes["tensor"] > 1

    @property
    def has_gatherable_shards(self) -> bool:
        """Whether weights are sharded along the first dimension only and stay on the device."""
        return self.sizes["tensor"] == 1 and not self.cpu_offload

    def stage_indices(self, rank: int) -> list[int]:
        """Return the stages of a rank: every n-th stage, or two in a V-shaped schedule."""
        num_ranks = self.sizes["pipeline"]
        pipeline_rank = rank // (self.world_size // num_ranks)
        if self.pipeline_schedule.is_v_shaped:
            return [pipeline_rank, self.num_stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.num_stages, num_ranks))

    def describe_group(self, axes: Sequence[str], devices_per_node: int | None) -> tuple[int, int]:
        """Return the size of the group along ``axes``, and its number of ranks in one node.

        Nodes contain consecutive ranks; ranks along the last axis are adjacent.
        """
        group_size, ranks_per_node, stride = 1, 1, 1
        for axis, size in reversed(self._sizes_with(axes).items()):
            if axis in axes:
                group_size *= size
                ranks_per_node *= min(size, max(1, (devices_per_node or self.world_size) // stride))
            stride *= size
        return group_size, ranks_per_node

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the ranks of the group along ``axes`` that contains ``rank``."""
        sizes = self._sizes_with(axes)
        coordinates = _coordinates(sizes, rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(
                coordinate == coordinates[axis]
                for axis, coordinate in _coordinates(sizes, other).items()
                if axis not in axes
            )
        )

    def _sizes_with(self, axes: Sequence[str]) -> dict[str, int]:
        """Sizes of the mesh that has ``axes``."""
        return self.sizes if all(axis in AXES for axis in axes) else self.expert_sizes


def _coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Index of a rank along each axis."""
    coordinates = {}
    for axis, size in reversed(sizes.items()):
        rank, coordinates[axis] = divmod(rank, size)
    return coordinates
