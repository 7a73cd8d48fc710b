"""Memory partition of one rank: the input of the analytic memory model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from itertools import accumulate, chain

from scalewise.cached_hash import cache_hash
from scalewise.callback_config import AVERAGE_BYTES_PER_ELEMENT, averaging_callback
from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import not_registered
from scalewise.models.base import StageSlice, Weight
from scalewise.models.op_graph import ForwardSpec
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import MAX_LIVE_ELEMENTS, DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import ContextAttention, MeshConfig, PipelineSchedule
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.forward_pass import forward_spec
from scalewise.planner.last_run import remember_last_run
from scalewise.planner.rank_partition import FSDPGroups, RankStages, partition_of
from scalewise.planner.weight_sizes import (
    gathered_bytes,
    multiples,
    padded_elements,
    shard_bytes,
    shard_elements,
    state_bytes,
)
from scalewise.quantization.config import weights_by_block
from scalewise.run_config import RunConfig


@cache_hash
@dataclass(frozen=True)
class FSDPMemory:
    """FSDP2: parameters gathered block by block, gradients reduced to shards."""

    num_shards: int
    """Number of ranks that shard each parameter."""
    gathered_element_bytes: int
    """Bytes per element of gathered parameters."""
    reduced_element_bytes: int
    """Bytes per element of gradients in a reduction."""
    keeps_unsharded: bool
    """Whether blocks stay unsharded between forward and backward."""
    keeps_between_passes: bool
    """Whether parameters stay unsharded for all micro-batches of a step."""
    prefetch: int
    """Number of blocks gathered ahead of use."""
    has_unsharded_gradients: bool
    """Whether gradients stay unsharded until the last micro-batch."""
    has_replicas: bool
    """Whether gradient shards are also all-reduced over replicas."""
    groups: FSDPGroups
    """Weights outside of blocks by FSDP group, before sharding."""

    def gathered_bytes(self, weights: tuple[Weight, ...]) -> int:
        """Return the size of gathered weights, in bytes."""
        return gathered_bytes(weights, self.gathered_element_bytes, self.num_shards)

    def reduced_bytes(self, weights: tuple[Weight, ...]) -> tuple[int, int]:
        """Return the sizes of a reduction of gradients in bytes: of its input and its output."""
        output = shard_elements(weights, self.num_shards, trained=True)
        source = padded_elements(weights, self.num_shards)
        return source * self.reduced_element_bytes, output * self.reduced_element_bytes

    def copied_gradient_elements(self, weights: tuple[Weight, ...]) -> int:
        """Return the elements of a gradient that FSDP2 copies, since it shards its columns."""
        is_sharded = self.num_shards > 1
        copied = (it.numel for it in weights if it.trainable and it.shard_dim and is_sharded)
        return max(copied, default=0)


@dataclass(frozen=True)
class ZeroMemory:
    """DeepSpeed ZeRO: master weights, gradient buckets and gathered parameters."""

    stage: int
    """ZeRO stage."""
    weight_element_bytes: int
    """Bytes per element of the weights used in forward and backward."""
    master_element_bytes: int
    """Bytes per element of the master weights that the optimizer updates."""
    gradient_element_bytes: int
    """Bytes per element of a gradient that waits for the optimizer step."""
    bucket_elements: int
    """Elements per gradient bucket."""
    num_buckets: int
    """Number of gradient buckets that are alive in backward."""
    max_live_elements: int
    """Maximum number of gathered elements between uses."""
    persistence_threshold: int
    """Parameters with fewer elements stay unsharded."""


@dataclass(frozen=True)
class RankMemory(RankStages):
    """Memory partition of one rank."""

    forward_spec: ForwardSpec
    """Sizes and formats of a forward pass."""
    block_weights: tuple[Weight, ...]
    """Weights of one block, after tensor parallelism and before sharding; of blocks that differ,
    those of the largest one."""
    other_weights: tuple[Weight, ...]
    """Weights outside of blocks, after tensor parallelism and before sharding."""
    parameter_shards: int = 1
    """Number of ranks that shard the parameters."""
    gradient_shards: int = 1
    """Number of ranks that shard the gradients."""
    state_shards: int = 1
    """Number of ranks that shard the optimizer state."""
    has_persistent_buckets: bool = False
    """Whether gradients are views of buckets that persist between steps."""
    bucket_copy_bytes: int = 0
    """Size of buckets that copy the gradients."""
    in_flight: int = 1
    """Maximum number of forward passes through one stage that wait for their backward."""
    num_pipeline_micro_batches: int = 1
    """Number of pipeline micro-batches per micro-batch."""
    pipeline_ranks: int = 1
    """Number of pipeline ranks."""
    num_stage_buffers: int = 1
    """Number of micro-batches with a buffer for received activations; in torch all of a schedule
    have one."""
    num_gradient_buffers: int = 1
    """Number of micro-batches with a buffer for received gradients; in torch all of a schedule."""
    fsdp: FSDPMemory | None = None
    """FSDP2 sharding."""
    zero: ZeroMemory | None = None
    """DeepSpeed ZeRO."""
    states_on_host: bool = False
    """Whether optimizer state is stored in host memory."""
    states_paged: bool = False
    """Whether the driver pages optimizer state between device and host."""
    parameters_on_host: bool = False
    """Whether parameters are stored in host memory."""
    states_on_disk: bool = False
    """Whether optimizer state is stored on disk."""
    parameters_on_disk: bool = False
    """Whether parameters are stored on disk."""
    weights_by_block: tuple[tuple[Weight, ...], ...] = ()
    """Weights of each block, in order; empty: all blocks are equal."""

    @cached_property
    def block_counts(self) -> Mapping[tuple[Weight, ...], int]:
        """Number of blocks with the same weights."""
        if self.weights_by_block:
            return Counter(self.weights_by_block)
        return {self.block_weights: self.num_layers}

    @property
    def all_weights(self) -> tuple[Weight, ...]:
        """Weights of all blocks and those outside of blocks."""
        blocks = Counter(self.block_counts).elements()
        return (*chain.from_iterable(blocks), *self.other_weights)

    def numel(self, shards: int, *, trained: bool = False) -> int:
        """Return the elements of a shard of the rank's parameters, or of the trained ones."""
        return self._sum_weights(lambda group: shard_elements(group, shards, trained=trained))

    def weight_bytes(self, element_bytes: int, shards: int) -> int:
        """Return the size of a shard of the rank's parameters, in bytes."""
        return self._sum_weights(lambda group: shard_bytes(group, element_bytes, shards))

    def state_bytes(self, run: RunConfig) -> int:
        """Return the size of the optimizer state of this rank, in bytes."""
        element_bytes = run.precision.parameters.bytes
        return self._sum_weights(
            lambda group: state_bytes(run.optimizer, group, self.state_shards, element_bytes)
        )

    def list_block_weights(self) -> tuple[tuple[Weight, ...], ...]:
        """Return the weights of each block, in order."""
        return self.weights_by_block or (self.block_weights,) * self.num_layers

    def cumulative_trained_elements(self, shards: int) -> tuple[int, ...]:
        """Return the trained elements of the last 0, 1, ... blocks, sharded."""
        if not self.weights_by_block:
            return multiples(
                shard_elements(self.block_weights, shards, trained=True), self.num_layers
            )
        blocks = reversed(self.weights_by_block)
        elements = (shard_elements(block, shards, trained=True) for block in blocks)
        return tuple(accumulate(elements, initial=0))

    def _sum_weights(self, measure: Callable[[tuple[Weight, ...]], int]) -> int:
        """Return the sum of a measure over the weights of all blocks and those outside."""
        blocks = sum(count * measure(group) for group, count in self.block_counts.items())
        return blocks + measure(self.other_weights)

    def ema_bytes(self, run: RunConfig) -> int:
        """Return the size of the moving average of the weights on this rank, in bytes."""
        has_average = averaging_callback(run.callbacks) is not None
        return (
            has_average
            * AVERAGE_BYTES_PER_ELEMENT
            * self.numel(self.parameter_shards, trained=True)
        )

    @property
    def streams_weights(self) -> bool:
        """Whether parameters are copied to the host and back, one at a time, for the update."""
        return self.states_on_host and self.zero is None and not self.parameters_on_host

    @property
    def largest_numel(self) -> int:
        """Elements of the largest trained parameter, after sharding."""
        weights = (*chain.from_iterable(self.block_counts), *self.other_weights)
        return max((w.shard_numel(self.state_shards) for w in weights if w.trainable), default=0)

    def scratch_bytes(self, run: RunConfig) -> int:
        """Return the temporary memory of an optimizer update, in bytes."""
        element_bytes, weights = (
            run.precision.parameters.bytes,
            (*chain.from_iterable(self.block_counts), *self.other_weights),
        )
        optimizer, shards, is_rounded = (
            run.optimizer,
            self.state_shards,
            run.precision.stochastic_rounding,
        )
        sizes = (
            optimizer.rounding_scratch_bytes(w, shards)
            if is_rounded
            else optimizer.scratch_bytes(w, shards, element_bytes)
            for w in weights
            if w.trainable
        )
        return max(sizes, default=0)


@singledispatch
def build_rank_memory(config: ParallelismConfig, run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the memory partition of a rank.

    Args:
        config: Parallelism strategy of ``run``; a strategy registers a function for its config.
        run: Run to train.
        rank: Global rank.
    """
    raise not_registered(build_rank_memory, config)


@remember_last_run
def rank_memory_of(run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the memory partition of a rank of a run."""
    return build_rank_memory(run.parallelism, run, rank)


@build_rank_memory.register
def single_rank_memory(config: SingleConfig, run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the memory of the only rank: the whole model."""
    return replicated_memory(run)


@build_rank_memory.register
def ddp_rank_memory(config: DDPConfig, run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the memory of a rank: a replica and gradient buckets."""
    state_shards = config.world_size if run.optimizer.shard else 1
    copied = config.world_size > 1 and not config.gradient_as_bucket_view
    copies = copied * run.trainable_parameters * run.precision.parameters.bytes
    return replace(
        replicated_memory(run),
        has_persistent_buckets=config.gradient_as_bucket_view,
        state_shards=state_shards,
        bucket_copy_bytes=copies,
    )


@build_rank_memory.register
def deepspeed_rank_memory(config: DeepSpeedConfig, run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the memory of a rank after the partitioning of the stage."""
    ranks, stage, precision = config.world_size, config.stage, run.precision
    accumulation_format = precision.compute if stage == 1 else precision.parameters
    num_buckets = 2 if config.overlap_comm and stage < 3 else 1
    if not config.contiguous_gradients:  # gradients stay in place; stage 3 concatenates them
        num_buckets = 2 if stage == 3 else 1
    return replace(
        replicated_memory(run),
        forward_spec=forward_spec(
            run, run.sequences_per_forward, run.data.sequence, casts_weights=True
        ),
        zero=ZeroMemory(
            stage,
            weight_element_bytes=precision.compute.bytes,
            master_element_bytes=precision.parameters.bytes,
            gradient_element_bytes=accumulation_format.bytes,
            bucket_elements=config.bucket_elements(run.trainable_parameters),
            num_buckets=num_buckets,
            max_live_elements=MAX_LIVE_ELEMENTS if stage == 3 else 0,
            persistence_threshold=config.keep_whole_below if stage == 3 else 0,
        ),
        state_shards=ranks,
        gradient_shards=ranks if stage >= 2 else 1,
        parameter_shards=ranks if stage == 3 else 1,
        states_on_host=config.offload_optimizer is not OffloadTarget.none,
        parameters_on_host=config.offload_parameters is not OffloadTarget.none,
        states_on_disk=config.offload_optimizer is OffloadTarget.nvme,
        parameters_on_disk=config.offload_parameters is OffloadTarget.nvme,
    )


@build_rank_memory.register
def mesh_rank_memory(config: MeshConfig, run: RunConfig, rank: int = 0) -> RankMemory:
    """Return the stages of a rank, sharded by tensor parallelism and by FSDP."""
    partition, sizes = partition_of(config, run, rank), config.sizes
    shards = config.parameter_shards
    parameters, compute = run.precision.parameters.bytes, run.precision.compute.bytes
    mixed = compute < parameters
    fsdp = FSDPMemory(
        shards,
        gathered_element_bytes=compute if mixed else parameters,
        reduced_element_bytes=4 if mixed else parameters,
        keeps_unsharded=not config.frees_after_forward,
        keeps_between_passes=config.gathers_once
        and run.accumulation > 1
        and sizes["pipeline"] == 1,
        prefetch=config.prefetch,
        has_unsharded_gradients=run.accumulation > 1
        and config.delays_reduction
        and sizes["pipeline"] == 1,
        has_replicas=sizes["replicate"] > 1,
        groups=partition.fsdp_groups(),
    )
    block, other = partition.weights_by_kind()
    pipeline_micro_batches = config.num_pipeline_micro_batches if sizes["pipeline"] > 1 else 1
    return RankMemory(
        partition.stages,
        forward_spec(
            run,
            partition.sequences,
            partition.tokens_per_sequence,
            casts_weights=config.uses_fsdp and mixed,
            tensor_ranks=sizes["tensor"],
            sequence_parallel=config.sequence_parallel and sizes["tensor"] > 1,
            loss_parallel=config.loss_parallel and sizes["tensor"] > 1,
            context_ranks=sizes["context"],
            expert_ranks=config.expert,
            gathers_keys=config.attention is ContextAttention.gather,
        ),
        block,
        other,
        parameter_shards=shards,
        gradient_shards=shards,
        state_shards=shards,
        in_flight=_max_in_flight(config, rank),
        num_pipeline_micro_batches=pipeline_micro_batches,
        num_stage_buffers=pipeline_micro_batches,
        num_gradient_buffers=pipeline_micro_batches,
        pipeline_ranks=sizes["pipeline"],
        fsdp=fsdp if config.uses_fsdp else None,
        states_on_host=config.cpu_offload and run.hardware.device is DeviceKind.cuda,
        states_paged=run.optimizer.pages_state and run.hardware.device is DeviceKind.cuda,
        parameters_on_host=config.cpu_offload and run.hardware.device is DeviceKind.cuda,
        weights_by_block=partition.weights_by_block(),
    )


def _max_in_flight(mesh: MeshConfig, rank: int) -> int:
    """Return the maximum number of forward passes through one stage that wait on a rank.

    GPipe: all. 1F1B: one per stage from this one to the last (Narayanan et al., 2019). With v
    stages per rank: 2 (p - 1 - r) + (v - 1) p + 1 (Narayanan et al., 2021, as in torch).
    """
    ranks = mesh.sizes["pipeline"]
    if ranks == 1:
        return 1
    if mesh.pipeline_schedule is PipelineSchedule.gpipe:
        return mesh.num_pipeline_micro_batches
    ranks_after = ranks - 1 - rank // (mesh.world_size // ranks)
    stages_per_rank = mesh.resolved_stages_per_rank
    if stages_per_rank == 1:
        return min(ranks_after + 1, mesh.num_pipeline_micro_batches)
    return min(
        2 * ranks_after + (stages_per_rank - 1) * ranks + 1,
        mesh.num_pipeline_micro_batches * stages_per_rank,
    )


def replicated_memory(run: RunConfig) -> RankMemory:
    """Return the partition of a rank that stores the whole model and unsharded sequences."""
    layers = run.model.layers
    block, rest = run.weight_census_by_kind()
    return RankMemory(
        (StageSlice(range(layers)),),
        forward_spec(run, run.sequences_per_forward, run.data.sequence),
        block,
        rest,
        states_on_host=run.optimizer.offload and run.hardware.device is DeviceKind.cuda,
        states_paged=run.optimizer.pages_state and run.hardware.device is DeviceKind.cuda,
        weights_by_block=weights_by_block(run.quantization, run.adapter, run.model),
    )
