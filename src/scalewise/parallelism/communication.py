"""What a rank sends in one optimizer step, declared by each layout and held by a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.models.base import TPStyle, Weight
from scalewise.parallelism.rank_partition import RankPartition, partition_of, tp_style

if TYPE_CHECKING:
    from scalewise.parallelism.mesh import MeshConfig
    from scalewise.run_config import RunConfig

SCALAR = 4
"""Bytes of a loss or a norm."""


class CollectiveKind(StrEnum):
    """A collective operation, or one message."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_to_all = "all_to_all"
    broadcast = "broadcast"
    send = "send"


@dataclass(frozen=True)
class Collective:
    """``count`` operations of one size in a step, as one rank sees them.

    ``axes``: the ranks that take part differ along these. ``bytes``: the larger of the tensors
    that go in and come out, on one rank: what is reduced, what is gathered, what is scattered.
    ``overlaps``: whether blocks are at work meanwhile, so that only its excess takes time.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    count: int
    name: str
    overlaps: bool = False


def mesh_collectives(mesh: MeshConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Returns what a rank of a mesh sends in one step.

    Exact but for shards inside a pipeline, whose weights are gathered once at the least.
    """
    share, held = partition_of(mesh, run, rank), mesh.stage_indices(rank)
    found = [
        *_fsdp_collectives(share),
        *(_tensor_collectives(share) if mesh.sizes["tensor"] > 1 else ()),
        *(_context_collectives(share) if mesh.sizes["context"] > 1 else ()),
        *(_pipeline_collectives(share, held) if mesh.sizes["pipeline"] > 1 else ()),
        Collective(CollectiveKind.all_reduce, tuple(mesh.sizes), SCALAR, 1, "the gradient's norm"),
    ]
    return tuple(collective for collective in found if collective.count)


def _fsdp_collectives(partition: RankPartition) -> Iterator[Collective]:
    """FSDP: a block's weights are gathered for forward and backward, its gradients scattered."""
    mesh, precision = partition.mesh, partition.run.precision
    ranks, replicas = mesh.sizes["shards"] * mesh.sizes["context"], mesh.sizes["replicate"]
    if ranks * replicas == 1:
        return
    mixed = precision.compute.bytes < precision.parameters.bytes
    gathered = precision.compute.bytes if mixed else precision.parameters.bytes
    reduced = SCALAR if mixed else precision.parameters.bytes
    block, rest = partition.weights_by_kind()
    reductions = partition.run.accumulation if mesh.reduce_each_micro_batch else 1
    for name, weights, layers in (("a block", block, partition.num_layers), ("the rest", rest, 1)):
        if not weights:
            continue
        whole = _padded_bytes(weights, ranks, gathered)
        trained = _padded_bytes((w for w in weights if w.trainable), ranks, reduced)
        again = weights is block and mesh.reshard_after_forward
        uses = 2 + partition.run.extra_forward_passes if again else 1
        if ranks > 1:
            axes, gathers = ("shards", "context"), layers * partition.forward_passes * uses
            yield Collective(
                CollectiveKind.all_gather, axes, whole, gathers, f"weights of {name}", overlaps=True
            )
            size = trained
            yield Collective(
                CollectiveKind.reduce_scatter,
                axes,
                size,
                layers * reductions * bool(size),
                f"gradients of {name}",
                overlaps=True,
            )
        if ranks > 1:
            yield from _update_collectives(partition, weights, layers, ranks)
        if replicas > 1:
            size = trained // ranks
            yield Collective(
                CollectiveKind.all_reduce,
                ("replicate",),
                size,
                layers * reductions * bool(size),
                f"gradients of {name}",
                overlaps=True,
            )


def _update_collectives(
    partition: RankPartition, weights: Iterable[Weight], layers: int, ranks: int
) -> Iterator[Collective]:
    """What an optimizer gathers that looks at whole matrices."""
    held = partition.run.precision.parameters.bytes
    gathered = [w for w in weights if w.trainable and partition.run.optimizer.gathers_update(w)]
    sizes = Counter(weight.shard_bytes(held, ranks) * ranks for weight in gathered)
    for size, count in sizes.items():
        axes, what = ("shards", "context"), "updates of matrices"
        yield Collective(CollectiveKind.all_gather, axes, size, layers * count, what)


def _padded_bytes(weights: Iterable[Weight], ranks: int, element_bytes: int) -> int:
    """Returns the bytes of weights, each cut by rows into equal shards; ``element_bytes``: of a
    number."""
    return sum(weight.shard_bytes(element_bytes, ranks) * ranks for weight in weights)


def _tensor_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Megatron: two joins a block; sequence parallelism makes each a gather and a scatter."""
    mesh, passes, axes = partition.mesh, partition.forward_passes, ("tensor",)
    layers, first, last = partition.num_layers, partition.has_embedding, partition.has_head
    # Into each pair of matrices and out of it, forward and backward; the ends have one pair.
    joins = 4 * layers + first + last
    chunked = partition.run.objective.loss_chunk is not None
    halves = tuple(partition.adapted_halves.values())
    # Attention's sums are made again; those that end a block are not, unless something follows.
    follows = halves[-1].adapted_row_layers or partition.run.model.has_post_norm
    again = partition.recomputed_layers[Recompute.full] * (1 + follows)
    without = _skipped_by_adapter(partition)
    asked = partition.run.runs_reference_forward  # a pass forward, without the adapter
    sums = (
        joins + again - (last and chunked) - without.reduce_scatters + asked * (2 * layers + first)
    )
    # Vectors are put before tokens, and left out, where each rank has all.
    alone = (first + (last and not chunked)) * (partition.run.adapter.prompt_tokens > 0)
    sums = passes * (sums - alone)
    yield Collective(
        CollectiveKind.all_reduce,
        axes,
        partition.embedding_bytes,
        passes * alone,
        "sums of a text alone",
    )
    if mesh.sequence_parallel:
        gathers = joins + 2 * sum(partition.recomputed_layers.values()) - without.all_gathers
        gathers = passes * (gathers + asked * (2 * layers + last))
        yield Collective(
            CollectiveKind.all_gather, axes, partition.residual_bytes, gathers, "tokens joined"
        )
        yield Collective(
            CollectiveKind.reduce_scatter,
            axes,
            partition.residual_bytes,
            sums,
            "sums cut by tokens",
        )
        yield from _replicated_grad_collectives(partition)
    else:
        yield Collective(CollectiveKind.all_reduce, axes, partition.residual_bytes, sums, "sums")
    yield from _lora_collectives(partition, layers)
    if last:
        yield from _loss_collectives(partition)


@dataclass(frozen=True)
class SkippedCollectives:
    """Messages of a pass through the first block that no weight before them asks for."""

    all_gathers: int = 0
    reduce_scatters: int = 0


def _skipped_by_adapter(partition: RankPartition) -> SkippedCollectives:
    """Returns what an adapter spares: gradients go back to the first weights that it added."""
    if not (partition.has_embedding and partition.run.has_frozen_weights):
        return SkippedCollectives()
    asked = _trains_embedding(partition)
    adapter = partition.run.adapter
    embeds = adapter.prompt_tokens or "embedding" in adapter.fully_trained_modules(
        partition.run.model
    )
    gathers, scatters = int(not embeds), 0
    for half in partition.adapted_halves.values():
        asked = asked or half.trains_norm
        gathers += not (asked or half.trains_before_output)
        scatters += not asked
        asked = asked or half.trains_before_output or half.adapted_row_layers > 0
    return SkippedCollectives(gathers, scatters)


def _trains_embedding(partition: RankPartition) -> bool:
    """Returns whether what stands before the blocks is trained beside an adapter."""
    adapter = partition.run.adapter
    trained = {"embedding", "position"} & {*adapter.fully_trained_modules(partition.run.model)}
    return adapter.prompt_tokens > 0 or bool(trained)


def _lora_collectives(partition: RankPartition, layers: int) -> Iterator[Collective]:
    """LoRA's narrow products: where the wide ones are joined, and where a column's rank is."""
    axes, passes = ("tensor",), layers * partition.forward_passes
    columns = sum(half.adapted_column_layers for half in partition.adapted_halves.values()) * passes
    each = sum(half.adapted_row_layers for half in partition.adapted_halves.values())
    rows, again = (
        each * passes,
        each * partition.recomputed_layers[Recompute.full] * partition.forward_passes,
    )
    size = (
        partition.sequences
        * partition.tokens_per_sequence
        * partition.run.adapter.rank
        * partition.activation_element_bytes
    )
    if partition.mesh.sequence_parallel:
        yield Collective(
            CollectiveKind.reduce_scatter, axes, size, rows + again, "an adapter's sums"
        )
        yield Collective(
            CollectiveKind.all_gather, axes, size, rows, "an adapter's gradients joined"
        )
        yield Collective(CollectiveKind.all_reduce, axes, size, columns, "an adapter's gradients")
    else:
        yield Collective(
            CollectiveKind.all_reduce, axes, size, rows + again + columns, "an adapter's sums"
        )
    if partition.run.adapter.magnitudes:  # rows end in the residual stream
        size = partition.run.model.width * SCALAR
        yield Collective(CollectiveKind.all_reduce, axes, size, rows + again, "norms of cut rows")


def _loss_collectives(partition: RankPartition) -> Iterator[Collective]:
    """The loss from logits of which each tensor rank has a part, all at once or in pieces."""
    mesh, model, axes = partition.mesh, partition.run.model, ("tensor",)
    objective = partition.run.objective
    chunk, again = objective.loss_chunk, not objective.takes_gradients_in_forward(partition.run)
    pieces = {partition.tokens_per_sequence: 1}
    if chunk is not None:
        each = max(1, chunk // partition.sequences)
        pieces = {
            each: partition.tokens_per_sequence // each,
            partition.tokens_per_sequence % each: 1,
        }
    for tokens, number in pieces.items():
        count = number * partition.forward_passes * bool(tokens)
        labels = partition.sequences * tokens
        runs = (2 if chunk is not None and again else 1) + partition.run.runs_reference_forward
        if mesh.loss_parallel:
            size, sums = labels * SCALAR, 3 * runs * count
            yield Collective(
                CollectiveKind.all_reduce, axes, size, sums, "the loss from cut logits"
            )
        else:
            size = labels * model.vocabulary * partition.activation_element_bytes
            yield Collective(CollectiveKind.all_gather, axes, size, runs * count, "logits")
        if chunk is not None:
            size = labels * model.width * partition.activation_element_bytes
            yield Collective(CollectiveKind.all_reduce, axes, size, count, "gradients of a piece")


def _replicated_grad_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Gradients of weights that see some of the tokens on each rank: norms and positions."""
    table = partition.tensor_parallel_styles
    size = partition.run.precision.parameters.bytes
    ranks = partition.mesh.sizes
    shards = ranks["shards"] * ranks["context"] * ranks["replicate"]
    reductions = partition.forward_passes
    if shards > 1 and not partition.mesh.reduce_each_micro_batch:
        reductions = partition.forward_passes // partition.run.accumulation
    sizes: dict[int, int] = {}
    block, rest = partition.weights_by_kind()
    for weight, layers in [
        *((it, partition.num_layers) for it in block),
        *((it, 1) for it in rest),
    ]:
        cut = tp_style(weight, table) if weight.trainable else None
        if cut is TPStyle.tokens:
            sizes[weight.numel * size] = sizes.get(weight.numel * size, 0) + layers
        elif cut is TPStyle.positions:
            whole = (
                partition.tokens_per_sequence
                * partition.run.model.width
                * partition.activation_element_bytes
            )
            yield Collective(
                CollectiveKind.all_gather,
                ("tensor",),
                whole,
                partition.forward_passes,
                "gradients of positions",
            )
    for each, count in sizes.items():
        yield Collective(
            CollectiveKind.all_reduce, ("tensor",), each, count * reductions, "gradients of norms"
        )


def _context_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Ulysses sends queries, keys, values and results; gathering sends keys and values."""
    mesh, model, axes = partition.mesh, partition.run.model, ("context",)
    without = _skipped_in_first_block(partition)
    layers = partition.num_layers * partition.forward_passes
    again = sum(partition.recomputed_layers.values()) * partition.forward_passes
    token = (
        partition.sequences
        * partition.tokens_per_sequence
        * partition.activation_element_bytes
        // mesh.sizes["tensor"]
    )
    query, key = token * model.query_width, token * model.kv_width
    if mesh.attention == "gather":
        size = 2 * key * mesh.sizes["context"]
        yield Collective(CollectiveKind.all_gather, axes, size, layers + again, "keys and values")
        scatters = layers - partition.forward_passes * ({"key", "value"} <= without)
        yield Collective(CollectiveKind.reduce_scatter, axes, size, scatters, "their gradients")
        return
    if (model.key_heads // mesh.sizes["tensor"]) % mesh.sizes["context"]:
        key = query  # each query head brings its own
    both = "and their gradients"
    sent = 4 * layers + 2 * partition.recomputed_layers[Recompute.full] * partition.forward_passes
    queries = sent - partition.forward_passes * (("query" in without) + ("mixed" in without))
    keys = sent - partition.forward_passes * (("key" in without) + ("value" in without))
    yield Collective(CollectiveKind.all_to_all, axes, query, queries, f"queries, results {both}")
    yield Collective(CollectiveKind.all_to_all, axes, key, keys, f"keys, values {both}")


def _skipped_in_first_block(partition: RankPartition) -> set[str]:
    """Returns what attention of the first block takes no gradient of, before any adapter."""
    if not (partition.has_embedding and partition.run.has_frozen_weights):
        return set()
    adapter, model = partition.run.adapter, partition.run.model
    changed = (
        *adapter.adapted_layers(model),
        *adapter.scaled_layers(model),
        *adapter.fully_trained_modules(model),
    )
    if _trains_embedding(partition) or "attention_norm" in changed:
        return set()
    inputs = {"query", "key", "value"}
    idle = {name for name in inputs if f"attention.{name}" not in changed}
    return idle | ({"mixed"} if idle == inputs else set())


def _pipeline_collectives(
    partition: RankPartition, stage_indices: Iterable[int]
) -> Iterator[Collective]:
    """Activations to the next stage, their gradients to the one before, the loss to all."""
    mesh, stage_indices = partition.mesh, set(stage_indices)
    cut = mesh.sizes["tensor"] if mesh.sequence_parallel else 1
    onward = sum(
        1
        for stage in stage_indices
        if stage + 1 < mesh.num_stages and stage + 1 not in stage_indices
    )
    back = sum(1 for stage in stage_indices if stage > 0 and stage - 1 not in stage_indices)
    size, axes = partition.residual_bytes // cut, ("pipeline",)
    yield Collective(
        CollectiveKind.send, axes, size, onward * partition.forward_passes, "activations"
    )
    yield Collective(
        CollectiveKind.send, axes, size, back * partition.forward_passes, "gradients of activations"
    )
    size = SCALAR * len(partition.run.objective.metric_keys)
    yield Collective(CollectiveKind.all_reduce, axes, size, partition.run.accumulation, "the loss")
    tied = partition.run.model.tied_weights
    ends = (partition.has_embedding, partition.has_head)
    if tied and any(ends) and not all(ends):
        shards = mesh.sizes["shards"] * mesh.sizes["context"]
        for weight in partition.weights_by_kind()[1]:
            if weight.name in tied and weight.trainable:
                rows = ceil(weight.shape[0] / shards)
                size = rows * prod(weight.shape[1:]) * partition.run.precision.parameters.bytes
                yield Collective(
                    CollectiveKind.all_reduce, ("pipeline",), size, 1, f"gradient of {weight.name}"
                )
