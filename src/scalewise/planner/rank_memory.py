"""Memory partition of one rank: the input of the analytic memory model."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property, lru_cache, singledispatch
from typing import TypeVar

from scalewise.cached_hash import cache_hash
from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import not_registered
from scalewise.models.base import StageSlice
from scalewise.models.op_graph import ForwardSpec
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import MAX_LIVE_ELEMENTS, DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import ContextAttention, MeshConfig, PipelineSchedule
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.forward_pass import forward_spec
from scalewise.planner.last_run import remember_last_run
from scalewise.planner.rank_partition import RankStages, partition_of
from scalewise.planner.rank_states import FSDPMemory, RankStates, ZeroMemory
from scalewise.planner.split_schedule import SplitSchedule
from scalewise.quantization.config import weights_by_block
from scalewise.run_config import RunConfig


@cache_hash
@dataclass(frozen=True)
class PipelinePasses(RankStages):
    """Forward passes through the stages of a rank that wait for their backward."""

    pipeline_ranks: int
    """Number of pipeline ranks."""
    in_flight: int
    """Maximum number of forward passes through one stage that wait for their backward."""
    num_pipeline_micro_batches: int
    """Number of pipeline micro-batches per micro-batch."""
    num_stage_buffers: int
    """Number of micro-batches with a buffer for received activations."""
    num_gradient_buffers: int
    """Number of micro-batches with a buffer for received gradients."""


STATE_FIELDS, PASS_FIELDS = (
    tuple(entry.name for entry in fields(part)) for part in (RankStates, PipelinePasses)
)
Part = TypeVar("Part", RankStates, PipelinePasses)


@dataclass(frozen=True)
class RankMemory(RankStates):
    """Memory partition of one rank."""

    _: KW_ONLY
    forward_spec: ForwardSpec
    """Sizes and formats of a forward pass."""
    in_flight: int = 1
    """Maximum number of forward passes through one stage that wait for their backward."""
    num_pipeline_micro_batches: int = 1
    """Number of pipeline micro-batches per micro-batch."""
    num_stage_buffers: int = 1
    """Number of micro-batches with a buffer for received activations; in torch all of a schedule
    have one."""
    num_gradient_buffers: int = 1
    """Number of micro-batches with a buffer for received gradients; in torch all of a schedule."""
    split_schedule: SplitSchedule | None = None
    """Order of passes of a pipeline whose backward is split."""

    @cached_property
    def states(self) -> RankStates:
        """Model states of the rank; equal ones are one object."""
        return _unique(RankStates(*(getattr(self, name) for name in STATE_FIELDS)))

    @cached_property
    def passes(self) -> PipelinePasses:
        """Forward passes of the rank; equal ones are one object."""
        return _unique(PipelinePasses(*(getattr(self, name) for name in PASS_FIELDS)))


@lru_cache(maxsize=4096)
def _unique_part(part: Hashable) -> Hashable:
    return part


def _unique(part: Part) -> Part:
    """Return one object for all equal parts, which caches compare by identity."""
    unique = _unique_part(part)
    assert isinstance(unique, type(part))
    return unique


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
    if not config.contiguous_gradients:
        num_buckets = 0 if stage == 3 else 1
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
            prefetch_elements=config.bucket_elements(run.model.num_parameters)
            if stage == 3 and ranks > 1
            else 0,
        ),
        # From stage 2 on, a gradient is copied into its bucket as soon as it is computed.
        has_persistent_buckets=stage >= 2,
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
        # Without an all-gather, FSDP2 allocates a block when it runs.
        prefetch=config.prefetch if shards > 1 else 0,
        has_unsharded_gradients=run.accumulation > 1 and config.delays_reduction,
        has_replicas=sizes["replicate"] > 1,
        groups=partition.fsdp_groups(),
    )
    block, other = partition.weights_by_kind()
    pipeline_micro_batches = config.num_pipeline_micro_batches if sizes["pipeline"] > 1 else 1
    return RankMemory(
        partition.stages,
        block,
        other,
        forward_spec=forward_spec(
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
        parameter_shards=shards,
        gradient_shards=shards,
        state_shards=shards,
        in_flight=_max_in_flight(config, rank),
        split_schedule=_split_schedule(config, rank) if config.splits_backward else None,
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


def _split_schedule(mesh: MeshConfig, rank: int) -> SplitSchedule:
    """Return the order of passes of a rank whose backward is split."""
    ranks = mesh.sizes["pipeline"]
    return SplitSchedule(
        mesh.pipeline_schedule,
        ranks,
        rank // (mesh.world_size // ranks),
        mesh.resolved_stages_per_rank,
        mesh.num_pipeline_micro_batches,
    )


def _max_in_flight(mesh: MeshConfig, rank: int) -> int:
    """Return the maximum number of forward passes through one stage that wait on a rank.

    GPipe: all. 1F1B: one per stage from this one to the last (Narayanan et al., 2019). With v
    stages per rank: 2 (p - 1 - r) + (v - 1) p + 1 (Narayanan et al., 2021, as in torch).
    """
    ranks = mesh.sizes["pipeline"]
    if ranks == 1:
        return 1
    if mesh.splits_backward:
        return _split_schedule(mesh, rank).max_in_flight
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
        block,
        rest,
        forward_spec=forward_spec(run, run.sequences_per_forward, run.data.sequence),
        states_on_host=run.optimizer.offload and run.hardware.device is DeviceKind.cuda,
        states_paged=run.optimizer.pages_state and run.hardware.device is DeviceKind.cuda,
        weights_by_block=weights_by_block(run.quantization, run.adapter, run.model),
    )
