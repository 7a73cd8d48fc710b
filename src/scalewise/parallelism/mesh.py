"""Products of sharded, tensor, context and pipeline parallelism over one named mesh of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Self

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig

if TYPE_CHECKING:
    from scalewise.parallelism.communication import Collective
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig
    from scalewise.strategies.base import ParallelStrategy

AXES = ("pipeline", "replicate", "shards", "context", "tensor")
"""Mesh axes from the outermost: neighbours in rank differ along the last, which talks most."""

AUTO = "auto"

Size = int | str


class ContextAttention(StrEnum):
    """Communication of attention across the context axis."""

    ulysses = "ulysses"
    """All-to-all: each rank gets whole sequences of some heads (Jacobs et al., 2023)."""
    gather = "gather"
    """All-gather of keys and values: each rank attends with its own queries (Llama 3)."""


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
        """Returns whether a rank holds several stages."""
        return self not in (PipelineSchedule.gpipe, PipelineSchedule.one_f_one_b)

    @property
    def splits_backward(self) -> bool:
        """Returns whether gradients of inputs and of weights are made apart (Qi et al., 2023)."""
        kinds = (PipelineSchedule.interleaved_zero_bubble, PipelineSchedule.zbv_zero_bubble)
        return self in kinds

    @property
    def is_v_shaped(self) -> bool:
        """Returns whether stages run through the ranks and back: rank 0 has first and last."""
        return self is PipelineSchedule.zbv_zero_bubble


@register_option("parallelism", "mesh")
@dataclass(frozen=True)
class MeshConfig(ParallelismConfig):
    """N-dimensional parallelism: any product of five mesh axes. One size may be ``auto``."""

    pipeline: Size = 1
    """Pipeline parallel size, in ranks; each stores consecutive layers. auto: all remaining
    devices."""
    replicate: Size = 1
    """Replication size (dp_replicate), in ranks; each stores a copy of the sharded model. auto:
    all remaining devices."""
    shards: Size = 1
    """Sharding size (dp_shard, FSDP2), in ranks; they partition parameters, gradients and
    optimizer state. auto: all remaining devices."""
    context: Size = 1
    """Context parallel size, in ranks; they partition each sequence, and parameters are sharded
    over them too. auto: all remaining devices."""
    tensor: Size = 1
    """Tensor parallel size, in ranks; they partition every matrix (Megatron-LM, 2019). auto: all
    remaining devices."""
    reshard_after_forward: bool = True
    """Whether gathered parameters are freed after a block's forward (ZeRO-3) or kept (ZeRO-2)."""
    prefetch: int = 1
    """Prefetch distance of parameter gathering, in blocks."""
    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer state are stored in host memory."""
    reduce_each_micro_batch: bool = True
    """Whether gradients are reduced after each micro-batch, or stay unsharded until the last."""
    sequence_parallel: bool = True
    """Whether activations outside of tensor-parallel layers are sharded along the sequence."""
    loss_parallel: bool = True
    """Whether the loss is computed from logits sharded along the vocabulary."""
    async_tensor: bool = False
    """Whether compiled matmuls overlap with tensor-parallel communication; CUDA only."""
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

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Returns the settled size of each axis, outermost first."""
        return {axis: size for axis in AXES if isinstance(size := getattr(self, axis), int)}

    @property
    def world_size(self) -> int:
        """Returns the product of the sizes."""
        return prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Returns ``replicate`` x ``shards``."""
        return self.sizes.get("replicate", 1) * self.sizes.get("shards", 1)

    def data_parallel_rank(self, rank: int) -> int:
        """Returns the place among the replicas and shards."""
        inner = self.sizes.get("context", 1) * self.sizes.get("tensor", 1)
        return rank // inner % self.data_parallel_size

    def dropout_rank(self, rank: int) -> int:
        """Returns the place on every axis but ``tensor``, whose ranks hold the same activations."""
        return rank // self.sizes.get("tensor", 1)

    @property
    def gradient_averaging_size(self) -> int:
        """Returns ``replicate`` x ``shards`` x ``context``."""
        return self.data_parallel_size * self.sizes.get("context", 1)

    @property
    def num_stages(self) -> int:
        """Returns the stages of the whole pipeline."""
        return self.sizes.get("pipeline", 1) * self.resolved_stages_per_rank

    @property
    def resolved_stages_per_rank(self) -> int:
        """Returns the stages that each pipeline rank holds."""
        return self.stages_per_rank or (2 if self.pipeline_schedule.is_interleaved else 1)

    @property
    def num_pipeline_micro_batches(self) -> int:
        """Returns the pieces that a micro batch passes the pipeline in."""
        return self.pipeline_micro_batches or self.num_stages

    @property
    def unmodeled_memory(self) -> str:
        """Returns what a schedule that splits its backward keeps between the halves."""
        split = self.sizes.get("pipeline", 1) > 1 and self.pipeline_schedule.splits_backward
        return "what a backward keeps whose gradients of weights come later" * split

    def resolve(self, devices: int | None) -> Self:
        """Returns the layout with the ``auto`` size filled in."""
        open_axes = [axis for axis in AXES if getattr(self, axis) == AUTO]
        if len(open_axes) != 1:
            return self
        others = prod(self.sizes.values())
        size = DEFAULT_CPU_RANKS if devices is None else max(1, devices // max(1, others))
        filled: dict[str, Any] = {open_axes[0]: size}
        return replace(self, **filled)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields sizes that are no layout, and schedules that no pipeline runs."""
        open_axes = [axis for axis in AXES if getattr(self, axis) == AUTO]
        for axis in open_axes[1:]:
            reason = f"only one size may be auto, and {open_axes[0]} is"
            yield ConfigIssue(f"parallelism.{axis}", AUTO, reason, f"set parallelism.{axis}=2")
        for axis in AXES:
            size = getattr(self, axis)
            if size != AUTO and not (isinstance(size, int) and size >= 1):
                yield ConfigIssue(f"parallelism.{axis}", size, "must be 1 or more, or auto")
        if self.prefetch < 0:
            yield ConfigIssue("parallelism.prefetch", self.prefetch, "must be 0 or more")
        for key in ("stages_per_rank", "pipeline_micro_batches"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield ConfigIssue(f"parallelism.{key}", value, "must be 1 or more, or null")
        schedule, each = self.pipeline_schedule, self.resolved_stages_per_rank
        if (each != 2) if schedule.is_v_shaped else (each > 1) != schedule.is_interleaved:
            wanted = (
                "2" if schedule.is_v_shaped else "2 or more" if schedule.is_interleaved else "1"
            )
            reason = f"{schedule.name} wants {wanted} stages on a rank"
            fix = "set parallelism.stages_per_rank=null"
            yield ConfigIssue("parallelism.stages_per_rank", each, reason, fix)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields sizes that do not divide what they cut, and what the axes rule out."""
        from scalewise.parallelism.mesh_validation import mesh_issues

        yield from super().validate_with(run)
        yield from mesh_issues(self, run)

    @property
    def reduces_after_backward(self) -> bool:
        """Returns whether pieces of a batch are summed up, or shards on their way to the host."""
        return self.sizes["pipeline"] > 1 or self.cpu_offload

    @property
    def backward_follows_forward(self) -> bool:
        """Returns whether no stage has passes that wait."""
        return self.sizes["pipeline"] == 1

    @property
    def shards_parameters(self) -> bool:
        """Returns whether shards or tensor parallelism leave a rank pieces of matrices."""
        return self.sizes["shards"] * self.sizes["context"] * self.sizes["tensor"] > 1

    @property
    def has_gatherable_shards(self) -> bool:
        """Returns whether weights are cut by rows alone, and stay on the device."""
        return self.sizes["tensor"] == 1 and not self.cpu_offload

    def stage_indices(self, rank: int) -> list[int]:
        """Returns the stages that a rank holds: in a loop over the ranks, or there and back."""
        ranks = self.sizes["pipeline"]
        place = rank // (self.world_size // ranks)
        if self.pipeline_schedule.is_v_shaped:
            return [place, self.num_stages - 1 - place]
        return list(range(place, self.num_stages, ranks))

    def collectives(self, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
        """Returns what a rank sends in one optimizer step, axis by axis."""
        from scalewise.parallelism.communication import mesh_collectives

        return mesh_collectives(self, run, rank)

    def describe_group(self, axes: Sequence[str], devices_per_node: int | None) -> tuple[int, bool]:
        """Returns how many ranks a message along ``axes`` joins, and whether it leaves a node.

        Ranks lie in a node one after the other, those that differ along the last axis first.
        """
        joined, inner = 1, 1
        for axis in reversed(AXES):
            size = self.sizes[axis]
            inner *= size
            if axis in axes and size > 1:
                joined *= size
                reach = inner
        if joined == 1:
            return 1, False
        return joined, devices_per_node is not None and reach > devices_per_node

    def distinct_ranks(self, run: RunConfig) -> tuple[int, ...]:
        """Returns a rank of each kind of place in the pipeline; of like ones the earliest.

        Ends and numbers of layers make the kind. The earlier has more passes that await backward.
        """
        from scalewise.parallelism.rank_partition import split_stages

        stages = split_stages(run.model, self.num_stages, run.data.sequence)
        kinds: dict[object, int] = {}
        for place in range(self.sizes["pipeline"]):
            rank = place * self.world_size // self.sizes["pipeline"]
            held = [stages[index] for index in self.stage_indices(rank)]
            kind = tuple((len(part.layers), part.is_first, part.is_last) for part in held)
            kinds.setdefault(kind, rank)
        return tuple(kinds.values())

    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Returns a rank's stages, cut by tensor parallelism and shared out by shards."""
        from scalewise.parallelism.rank_memory import FSDPMemory, RankMemory, forward_spec
        from scalewise.parallelism.rank_partition import partition_of

        share, sizes = partition_of(self, run, rank), self.sizes
        shards = sizes["shards"] * sizes["context"]
        sharded = shards * sizes["replicate"] > 1
        parameters, compute = run.precision.parameters.bytes, run.precision.compute.bytes
        mixed = compute < parameters
        gathering = FSDPMemory(
            shards,
            gathered_element_bytes=compute if mixed else parameters,
            reduced_element_bytes=4 if mixed else parameters,
            keeps_unsharded=not self.reshard_after_forward,
            prefetch=self.prefetch,
            has_unsharded_gradients=run.accumulation > 1 and not self.reduce_each_micro_batch,
            has_replicas=sizes["replicate"] > 1,
        )
        block, rest = share.weights_by_kind()
        return RankMemory(
            share.stages,
            replace(
                forward_spec(
                    run, share.sequences, share.tokens_per_sequence, casts_weights=sharded and mixed
                ),
                tensor_ranks=sizes["tensor"],
                sequence_parallel=self.sequence_parallel and sizes["tensor"] > 1,
                loss_parallel=self.loss_parallel and sizes["tensor"] > 1,
                context_ranks=sizes["context"],
                gathers_keys=self.attention is ContextAttention.gather,
            ),
            block,
            rest,
            parameter_shards=shards,
            gradient_shards=shards,
            state_shards=shards,
            in_flight=self._max_in_flight(rank),
            num_pipeline_micro_batches=self.num_pipeline_micro_batches
            if sizes["pipeline"] > 1
            else 1,
            pipeline_ranks=sizes["pipeline"],
            fsdp=gathering if sharded else None,
            states_on_host=self.cpu_offload and run.hardware.device is DeviceKind.cuda,
            states_paged=run.optimizer.pages_state and run.hardware.device is DeviceKind.cuda,
            parameters_on_host=self.cpu_offload and run.hardware.device is DeviceKind.cuda,
        )

    def _max_in_flight(self, rank: int) -> int:
        """Returns the passes, of one stage each, that await their backward on a rank at the most.

        GPipe: all. 1F1B: one for each stage from here to the last (Narayanan et al., 2019). With
        v stages on a rank 2 (p - 1 - r) + (v - 1) p + 1 (Narayanan et al., 2021, Megatron-LM, as
        torch schedules it).
        """
        ranks = self.sizes["pipeline"]
        if ranks == 1:
            return 1
        if self.pipeline_schedule is PipelineSchedule.gpipe:
            return self.num_pipeline_micro_batches
        after = ranks - 1 - rank // (self.world_size // ranks)
        each = self.resolved_stages_per_rank
        if each == 1:
            return min(after + 1, self.num_pipeline_micro_batches)
        return min(2 * after + (each - 1) * ranks + 1, self.num_pipeline_micro_batches * each)

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from ``rank`` along ``axes`` alone, itself among them."""
        own = self._coordinates(rank)
        fixed = [axis for axis in AXES if axis not in axes]
        return tuple(
            other
            for other in range(self.world_size)
            if all(self._coordinates(other)[axis] == own[axis] for axis in fixed)
        )

    def _coordinates(self, rank: int) -> dict[str, int]:
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, self.sizes[axis])
        return places

    def build_strategy(self, device: DeviceKind) -> ParallelStrategy:
        """Returns one strategy on Lightning's ``ModelParallelStrategy`` for all five axes."""
        if self.world_size == 1:
            from scalewise.strategies.single import SingleDevice

            return SingleDevice(device)
        from scalewise.strategies.nd_parallel import MeshStrategy

        return MeshStrategy(self)
