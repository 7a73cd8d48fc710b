"""Collectives of one rank in one optimizer step, by parallelism strategy.

Tests compare them with the collectives of real steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from math import ceil, prod

from scalewise.hardware import DeviceKind
from scalewise.models.base import Weight
from scalewise.models.op_graph import Recompute
from scalewise.optimizers.config import BF16_BYTES, batch_size
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.expert_communication import changed_modules, expert_collectives
from scalewise.planner.fsdp_communication import fsdp_collectives
from scalewise.planner.rank_partition import RankPartition, partition_of
from scalewise.planner.tensor_communication import SCALAR_BYTES, tensor_collectives
from scalewise.quantization.config import weights_by_block
from scalewise.run_config import RunConfig


@singledispatch
def list_collectives(
    config: ParallelismConfig, run: RunConfig, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of a rank in one optimizer step; without registration, none.

    Args:
        config: Parallelism strategy of ``run``; a strategy registers a function for its config.
        run: Run to train.
        rank: Global rank.
    """
    return ()


@list_collectives.register
def mesh_collectives(mesh: MeshConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Return the collectives of a rank of a mesh in one step.

    Exact, except for sharded parameters in a pipeline, which count the minimum of one gather.
    """
    partition, stage_indices = partition_of(mesh, run, rank), mesh.stage_indices(rank)
    collectives = [
        *fsdp_collectives(partition),
        *_shard_exchanges(partition, rank),
        *(tensor_collectives(partition) if mesh.sizes["tensor"] > 1 else ()),
        *(_context_collectives(partition) if mesh.sizes["context"] > 1 else ()),
        *expert_collectives(partition),
        *(_pipeline_collectives(partition, stage_indices) if mesh.sizes["pipeline"] > 1 else ()),
        Collective(
            CollectiveKind.all_reduce, tuple(mesh.sizes), SCALAR_BYTES, 1, "the gradient's norm"
        ),
        *_spike_collectives(run, tuple(mesh.sizes)),
    ]
    return tuple(collective for collective in collectives if collective.count)


def _spike_collectives(run: RunConfig, axes: tuple[str, ...]) -> Iterator[Collective]:
    """All-reduce of the loss and the gradient norm, by which all ranks skip the same steps."""
    if run.trainer.skip_sigma is not None:
        yield Collective(CollectiveKind.all_reduce, axes, 2 * SCALAR_BYTES, 1, "spikes")


def _shard_exchanges(partition: RankPartition, rank: int) -> Iterator[Collective]:
    """All-to-alls by which each rank gets whole updates of some matrices, and returns them."""
    mesh, axes = partition.mesh, ("shards", "context")
    block, _ = partition.weights_by_kind()
    blocks = Counter(partition.weights_by_block()) or {block: partition.num_layers}
    shapes = _distributed_shapes(partition.run, blocks)
    if not shapes:
        return
    group = mesh.ranks_along(axes, rank)
    ranks, index = len(group), group.index(rank)
    for (rows, columns), count, rounds in _exchange_rounds(partition.run, shapes, ranks):
        chunk = -(-rows // ranks)
        sent = count * max(0, min(chunk, rows - index * chunk))
        received = len(range(index, count, ranks)) * rows
        size = max(sent, received) * columns * BF16_BYTES
        name = "updates of matrices"
        yield Collective(CollectiveKind.all_to_all, axes, size, 2 * rounds * bool(ranks > 1), name)


def _replica_exchanges(run: RunConfig, ranks: int) -> Iterator[Collective]:
    """All-gathers of the updates that each rank has computed for some matrices."""
    blocks = weights_by_block(run.quantization, run.adapter, run.model)
    counts: Mapping[tuple[Weight, ...], int] = Counter(blocks)
    counts = counts or {run.weight_census_by_kind()[0]: run.model.layers}
    shapes = _distributed_shapes(run, counts)
    for (rows, columns), count, rounds in _exchange_rounds(run, shapes, ranks):
        size = ranks * -(-count // ranks) * rows * columns * BF16_BYTES
        name = "updates of matrices"
        yield Collective(CollectiveKind.all_gather, ("replicate",), size, rounds, name)


def _distributed_shapes(
    run: RunConfig, blocks: Mapping[tuple[Weight, ...], int]
) -> Counter[tuple[int, int]]:
    """Number of matrices of each shape whose updates are divided among data-parallel ranks.

    ``blocks``: number of blocks with the same weights.
    """
    shapes: Counter[tuple[int, int]] = Counter()
    for block, count in blocks.items():
        for weight in block:
            if weight.trainable and run.optimizer.distributes_update(weight):
                rows, columns = weight.shape
                shapes[rows, columns] += count
    return shapes


def _exchange_rounds(
    run: RunConfig, shapes: Mapping[tuple[int, int], int], ranks: int
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Shape, number of matrices and number of rounds in which they are exchanged."""
    on_cuda = run.hardware.device is DeviceKind.cuda
    for shape, count in shapes.items():
        per_round = ranks * batch_size(prod(shape), on_cuda=on_cuda)
        if run.optimizer.in_backward:
            per_round = 1
        rounds, left = divmod(count, per_round)
        if rounds:
            yield shape, per_round, rounds
        if left:
            yield shape, left, 1


def _context_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Ulysses: all-to-all of attention inputs and outputs. Gather: all-gather of keys, values."""
    mesh, model, axes = partition.mesh, partition.run.model, ("context",)
    skipped = _skipped_in_first_block(partition)
    layers = partition.num_layers * partition.forward_passes
    recomputed = sum(partition.recomputed_layers.values()) * partition.forward_passes
    bytes_per_width = (
        partition.sequences
        * partition.tokens_per_sequence
        * partition.activation_element_bytes
        // mesh.sizes["tensor"]
    )
    query_bytes, key_bytes = bytes_per_width * model.query_width, bytes_per_width * model.kv_width
    if mesh.attention == "gather":
        size = 2 * key_bytes * mesh.sizes["context"]
        yield Collective(
            CollectiveKind.all_gather, axes, size, layers + recomputed, "keys and values"
        )
        scatters = layers - partition.forward_passes * ({"key", "value"} <= skipped)
        yield Collective(CollectiveKind.reduce_scatter, axes, size, scatters, "their gradients")
        return
    if (model.key_heads // mesh.sizes["tensor"]) % mesh.sizes["context"]:
        key_bytes = query_bytes  # keys are repeated for each query head
    suffix = "and their gradients"
    num_exchanges = (
        4 * layers + 2 * partition.recomputed_layers[Recompute.full] * partition.forward_passes
    )
    query_exchanges = num_exchanges - partition.forward_passes * (
        ("query" in skipped) + ("mixed" in skipped)
    )
    key_exchanges = num_exchanges - partition.forward_passes * (
        ("key" in skipped) + ("value" in skipped)
    )
    yield Collective(
        CollectiveKind.all_to_all, axes, query_bytes, query_exchanges, f"queries, results {suffix}"
    )
    yield Collective(
        CollectiveKind.all_to_all, axes, key_bytes, key_exchanges, f"keys, values {suffix}"
    )


def _skipped_in_first_block(partition: RankPartition) -> set[str]:
    """Return the attention inputs of the first block that need no gradient, before any adapter."""
    if not (partition.has_embedding and partition.run.has_frozen_weights):
        return set()
    changed = changed_modules(partition)
    if partition.trains_embedding or "attention_norm" in changed:
        return set()
    inputs = {"query", "key", "value"}
    skipped = {name for name in inputs if f"attention.{name}" not in changed}
    return skipped | ({"mixed"} if skipped == inputs else set())


def _pipeline_collectives(
    partition: RankPartition, stage_indices: Iterable[int]
) -> Iterator[Collective]:
    """Pipeline: activations to the next stage, gradients to the previous one, the loss to all."""
    mesh, stage_indices = partition.mesh, set(stage_indices)
    sequence_shards = mesh.sizes["tensor"] if mesh.sequence_parallel else 1
    num_next = sum(
        1
        for stage in stage_indices
        if stage + 1 < mesh.num_stages and stage + 1 not in stage_indices
    )
    num_previous = sum(1 for stage in stage_indices if stage > 0 and stage - 1 not in stage_indices)
    size, axes = partition.residual_bytes // sequence_shards, ("pipeline",)
    yield Collective(
        CollectiveKind.send, axes, size, num_next * partition.forward_passes, "activations"
    )
    yield Collective(
        CollectiveKind.send,
        axes,
        size,
        num_previous * partition.forward_passes,
        "gradients of activations",
    )
    size = SCALAR_BYTES * len(partition.run.objective.metric_keys)
    yield Collective(CollectiveKind.all_reduce, axes, size, partition.run.accumulation, "the loss")
    tied = partition.run.model.tied_weights
    has_ends = (partition.has_embedding, partition.has_head)
    if tied and any(has_ends) and not all(has_ends):
        for weight in partition.weights_by_kind()[1]:
            if weight.name in tied and weight.trainable:
                shard_rows = ceil(weight.shape[0] / mesh.parameter_shards)
                size = (
                    shard_rows * prod(weight.shape[1:]) * partition.run.precision.parameters.bytes
                )
                yield Collective(
                    CollectiveKind.all_reduce, ("pipeline",), size, 1, f"gradient of {weight.name}"
                )


@list_collectives.register
def ddp_collectives(config: DDPConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Return the gradient all-reduce of a step, or that of PowerSGD factors.

    PowerSGD counts as after its lossless steps, and so does post-local SGD: an all-reduce of the
    weights every ``averaging_period`` steps, which overlaps with nothing.
    """
    if config.world_size == 1:
        return ()
    half = config.comm_hook in (CommHook.fp16, CommHook.bf16, CommHook.fp16_powersgd)
    element_bytes = 2 if half else run.precision.parameters.bytes
    trained = [weight for weight in run.weight_census() if weight.trainable]
    elements = {"gradients": sum(weight.numel for weight in trained)}
    if config.comm_hook.is_powersgd:
        elements = _powersgd_numel(config, trained)
    if not config.averages_gradients:
        elements = {"weights": elements["gradients"] // config.averaging_period}
    reductions = [
        Collective(
            CollectiveKind.all_reduce,
            ("replicate",),
            count * element_bytes,
            1,
            name,
            overlaps=config.averages_gradients,
        )
        for name, count in elements.items()
        if count
    ]
    divides_updates = config.averages_gradients and not run.optimizer.shard
    return (
        *reductions,
        *(_replica_exchanges(run, config.world_size) if divides_updates else ()),
        *_spike_collectives(run, ("replicate",)),
    )


def _powersgd_numel(config: DDPConfig, weights: Iterable[Weight]) -> dict[str, int]:
    """Return the elements that PowerSGD reduces: n x m becomes n x rank and rank x m.

    Parameters that would shrink to no less than half are not compressed (Vogels et al.,
    2019, section 3).
    """
    uncompressed = left = right = 0
    for weight in weights:
        n, m = weight.shape[0], weight.numel // weight.shape[0]
        rank = min(n, m, config.powersgd_rank)
        if 2 * (n + m) * rank < n * m:
            left, right = left + n * rank, right + m * rank
        else:
            uncompressed += weight.numel
    return {"gradients": uncompressed, "left factors": left, "right factors": right}


@list_collectives.register
def deepspeed_collectives(
    config: DeepSpeedConfig, run: RunConfig, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the gradient reduction and the parameter gathering of a step.

    Stage 1 reduces once per step, stages 2 and 3 once per micro-batch. Stage 3 gathers
    parameters before each forward and backward, stages 1 and 2 once per step (Rajbhandari et
    al., 2020, section 7). With ``hierarchical``, backward gathers from the second copy in a group.
    """
    if config.world_size == 1:
        return ()
    passes, precision = run.accumulation, run.precision
    num_trained = num_parameters = run.trainable_parameters
    if config.stage == 3:
        num_parameters = sum(weight.numel for weight in run.weight_census())
    reduced_bytes = num_trained * precision.parameters.bytes
    if config.quantized_gradients:
        reduced_bytes = num_trained // 2  # int4
    gathered_bytes = num_parameters * (1 if config.quantized_weights else precision.compute.bytes)
    num_reductions = passes if config.stage > 1 else 1
    num_gathers = 2 * passes if config.stage == 3 else 1
    axes, gathers_overlap = ("replicate",), config.stage == 3
    second_gathers = passes * (config.stage == 3 and config.hierarchical > 1)
    collectives = (
        Collective(
            CollectiveKind.reduce_scatter,
            axes,
            reduced_bytes,
            num_reductions,
            "gradients",
            overlaps=config.overlap_comm,
        ),
        Collective(
            CollectiveKind.all_gather,
            axes,
            gathered_bytes,
            num_gathers - second_gathers,
            "weights",
            overlaps=gathers_overlap,
        ),
        Collective(
            CollectiveKind.all_gather,
            ("hierarchical",),
            gathered_bytes,
            second_gathers,
            "weights of the second copy",
            overlaps=True,
        ),
    )
    return tuple(collective for collective in collectives if collective.count)
