"""Collectives of one rank of a mesh in one optimizer step.

Tests compare them with the collectives of real steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod

from scalewise.models.base import TPStyle, Weight, tp_style
from scalewise.models.op_graph import Recompute
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.rank_partition import RankPartition, partition_of
from scalewise.run_config import RunConfig

SCALAR_BYTES = 4
"""Bytes of a loss or a norm."""


def mesh_collectives(mesh: MeshConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Return the collectives of a rank of a mesh in one step.

    Exact, except for sharded parameters in a pipeline, which count the minimum of one gather.
    """
    partition, stage_indices = partition_of(mesh, run, rank), mesh.stage_indices(rank)
    collectives = [
        *_fsdp_collectives(partition),
        *(_tensor_collectives(partition) if mesh.sizes["tensor"] > 1 else ()),
        *(_context_collectives(partition) if mesh.sizes["context"] > 1 else ()),
        *(_pipeline_collectives(partition, stage_indices) if mesh.sizes["pipeline"] > 1 else ()),
        Collective(
            CollectiveKind.all_reduce, tuple(mesh.sizes), SCALAR_BYTES, 1, "the gradient's norm"
        ),
    ]
    return tuple(collective for collective in collectives if collective.count)


def _fsdp_collectives(partition: RankPartition) -> Iterator[Collective]:
    """FSDP: gathers of parameters for forward and backward, and reductions of gradients."""
    mesh, precision = partition.mesh, partition.run.precision
    ranks, replicas = mesh.sizes["shards"] * mesh.sizes["context"], mesh.sizes["replicate"]
    if ranks * replicas == 1:
        return
    mixed = precision.compute.bytes < precision.parameters.bytes
    gathered_element_bytes = precision.compute.bytes if mixed else precision.parameters.bytes
    reduced_element_bytes = SCALAR_BYTES if mixed else precision.parameters.bytes
    block, other = partition.weights_by_kind()
    reductions = partition.run.accumulation if mesh.reduce_each_micro_batch else 1
    for name, weights, layers in (("a block", block, partition.num_layers), ("the rest", other, 1)):
        if not weights:
            continue
        gathered_bytes = _padded_bytes(weights, ranks, gathered_element_bytes)
        reduced_bytes = _padded_bytes(
            (w for w in weights if w.trainable), ranks, reduced_element_bytes
        )
        gathers_again = weights is block and mesh.reshard_after_forward
        gathers_per_pass = 2 + partition.run.extra_forward_passes if gathers_again else 1
        if ranks > 1:
            axes, gathers = (
                ("shards", "context"),
                layers * partition.forward_passes * gathers_per_pass,
            )
            yield Collective(
                CollectiveKind.all_gather,
                axes,
                gathered_bytes,
                gathers,
                f"weights of {name}",
                overlaps=True,
            )
            size = reduced_bytes
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
            size = reduced_bytes // ranks
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
    """Gathers of an optimizer that updates unsharded matrices."""
    element_bytes = partition.run.precision.parameters.bytes
    gathered = [w for w in weights if w.trainable and partition.run.optimizer.gathers_update(w)]
    sizes = Counter(weight.shard_bytes(element_bytes, ranks) * ranks for weight in gathered)
    for size, count in sizes.items():
        axes, name = ("shards", "context"), "updates of matrices"
        yield Collective(CollectiveKind.all_gather, axes, size, layers * count, name)


def _padded_bytes(weights: Iterable[Weight], ranks: int, element_bytes: int) -> int:
    """Return the size of weights padded to equal shards along the first dimension, in bytes."""
    return sum(weight.shard_bytes(element_bytes, ranks) * ranks for weight in weights)


def _tensor_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Megatron-LM: two all-reduces per block, which sequence parallelism splits in two each."""
    mesh, passes, axes = partition.mesh, partition.forward_passes, ("tensor",)
    layers, first, last = partition.num_layers, partition.has_embedding, partition.has_head
    # Around each pair of matrices, in forward and backward; embedding and head form one pair.
    reductions = 4 * layers + first + last
    chunked = partition.run.objective.loss_chunk is not None
    halves = tuple(partition.adapted_halves.values())
    # The attention output is recomputed; the block output is not, unless a layer follows it.
    has_layer_after = halves[-1].adapted_row_layers or partition.run.model.has_post_norm
    recomputed = partition.recomputed_layers[Recompute.full] * (1 + has_layer_after)
    skipped = _skipped_by_adapter(partition)
    # The reference forward pass runs without the adapter.
    has_reference_forward = partition.run.runs_reference_forward
    reduce_scatters = (
        reductions
        + recomputed
        - (last and chunked)
        - skipped.reduce_scatters
        + has_reference_forward * (2 * layers + first)
    )
    # Prompt tokens are added and removed where each rank has the whole sequence.
    prompt_reductions = (first + (last and not chunked)) * (partition.run.adapter.prompt_tokens > 0)
    reduce_scatters = passes * (reduce_scatters - prompt_reductions)
    yield Collective(
        CollectiveKind.all_reduce,
        axes,
        partition.embedding_bytes,
        passes * prompt_reductions,
        "sums of a text alone",
    )
    if mesh.sequence_parallel:
        all_gathers = (
            reductions + 2 * sum(partition.recomputed_layers.values()) - skipped.all_gathers
        )
        all_gathers = passes * (all_gathers + has_reference_forward * (2 * layers + last))
        yield Collective(
            CollectiveKind.all_gather, axes, partition.residual_bytes, all_gathers, "tokens joined"
        )
        yield Collective(
            CollectiveKind.reduce_scatter,
            axes,
            partition.residual_bytes,
            reduce_scatters,
            "sums cut by tokens",
        )
        yield from _replicated_grad_collectives(partition)
    else:
        yield Collective(
            CollectiveKind.all_reduce, axes, partition.residual_bytes, reduce_scatters, "sums"
        )
    yield from _lora_collectives(partition, layers)
    if last:
        yield from _loss_collectives(partition)


@dataclass(frozen=True)
class SkippedCollectives:
    """Collectives of the first block that a frozen base model does not need."""

    all_gathers: int = 0
    """Number of all-gathers."""
    reduce_scatters: int = 0
    """Number of reduce-scatters."""


def _skipped_by_adapter(partition: RankPartition) -> SkippedCollectives:
    """Return the collectives before the first trained weight, which needs no gradient of them."""
    if not (partition.has_embedding and partition.run.has_frozen_weights):
        return SkippedCollectives()
    needs_gradient = _trains_embedding(partition)
    adapter = partition.run.adapter
    trains_input = adapter.prompt_tokens or "embedding" in adapter.fully_trained_modules(
        partition.run.model
    )
    all_gathers, reduce_scatters = int(not trains_input), 0
    for half in partition.adapted_halves.values():
        needs_gradient = needs_gradient or half.trains_norm
        all_gathers += not (needs_gradient or half.trains_before_output)
        reduce_scatters += not needs_gradient
        needs_gradient = needs_gradient or half.trains_before_output or half.adapted_row_layers > 0
    return SkippedCollectives(all_gathers, reduce_scatters)


def _trains_embedding(partition: RankPartition) -> bool:
    """Whether an adapter run trains weights before the blocks."""
    adapter = partition.run.adapter
    trained = {"embedding", "position"} & {*adapter.fully_trained_modules(partition.run.model)}
    return adapter.prompt_tokens > 0 or bool(trained)


def _lora_collectives(partition: RankPartition, layers: int) -> Iterator[Collective]:
    """LoRA: collectives of row-parallel inputs and of column-parallel gradients."""
    axes, passes = ("tensor",), layers * partition.forward_passes
    columns = sum(half.adapted_column_layers for half in partition.adapted_halves.values()) * passes
    row_layers = sum(half.adapted_row_layers for half in partition.adapted_halves.values())
    rows, recomputed_rows = (
        row_layers * passes,
        row_layers * partition.recomputed_layers[Recompute.full] * partition.forward_passes,
    )
    size = (
        partition.sequences
        * partition.tokens_per_sequence
        * partition.run.adapter.rank
        * partition.activation_element_bytes
    )
    if partition.mesh.sequence_parallel:
        yield Collective(
            CollectiveKind.reduce_scatter, axes, size, rows + recomputed_rows, "an adapter's sums"
        )
        yield Collective(
            CollectiveKind.all_gather, axes, size, rows, "an adapter's gradients joined"
        )
        yield Collective(CollectiveKind.all_reduce, axes, size, columns, "an adapter's gradients")
    else:
        yield Collective(
            CollectiveKind.all_reduce,
            axes,
            size,
            rows + recomputed_rows + columns,
            "an adapter's sums",
        )
    if partition.run.adapter.magnitudes:  # row-parallel outputs are in the residual stream
        size = partition.run.model.width * SCALAR_BYTES
        yield Collective(
            CollectiveKind.all_reduce, axes, size, rows + recomputed_rows, "norms of cut rows"
        )


def _loss_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Loss from logits sharded along the vocabulary, at once or in chunks."""
    mesh, model, axes = partition.mesh, partition.run.model, ("tensor",)
    objective = partition.run.objective
    chunk, is_recomputed = (
        objective.loss_chunk,
        not partition.run.computes_loss_gradients_in_forward,
    )
    counts_by_tokens = {partition.tokens_per_sequence: 1}
    if chunk is not None:
        chunk_tokens = max(1, chunk // partition.sequences)
        counts_by_tokens = {
            chunk_tokens: partition.tokens_per_sequence // chunk_tokens,
            partition.tokens_per_sequence % chunk_tokens: 1,
        }
    for tokens, num_chunks in counts_by_tokens.items():
        count = num_chunks * partition.forward_passes * bool(tokens)
        labels = partition.sequences * tokens
        runs = (
            2 if chunk is not None and is_recomputed else 1
        ) + partition.run.runs_reference_forward
        if mesh.loss_parallel:
            size, num_reductions = labels * SCALAR_BYTES, 3 * runs * count
            yield Collective(
                CollectiveKind.all_reduce, axes, size, num_reductions, "the loss from cut logits"
            )
        else:
            size = labels * model.vocabulary * partition.activation_element_bytes
            yield Collective(CollectiveKind.all_gather, axes, size, runs * count, "logits")
        if chunk is not None:
            size = labels * model.width * partition.activation_element_bytes
            yield Collective(CollectiveKind.all_reduce, axes, size, count, "gradients of a piece")


def _replicated_grad_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Gradients of replicated weights that see a part of the tokens: norms and positions."""
    styles = partition.tensor_parallel_styles
    element_bytes = partition.run.precision.parameters.bytes
    ranks = partition.mesh.sizes
    shards = ranks["shards"] * ranks["context"] * ranks["replicate"]
    reductions = partition.forward_passes
    if shards > 1 and not partition.mesh.reduce_each_micro_batch:
        reductions = partition.forward_passes // partition.run.accumulation
    sizes: dict[int, int] = {}
    block, other = partition.weights_by_kind()
    for weight, layers in [
        *((it, partition.num_layers) for it in block),
        *((it, 1) for it in other),
    ]:
        style = tp_style(weight, styles) if weight.trainable else None
        if style is TPStyle.tokens:
            sizes[weight.numel * element_bytes] = (
                sizes.get(weight.numel * element_bytes, 0) + layers
            )
        elif style is TPStyle.positions:
            activation_bytes = (
                partition.tokens_per_sequence
                * partition.run.model.width
                * partition.activation_element_bytes
            )
            yield Collective(
                CollectiveKind.all_gather,
                ("tensor",),
                activation_bytes,
                partition.forward_passes,
                "gradients of positions",
            )
    for weight_bytes, count in sizes.items():
        yield Collective(
            CollectiveKind.all_reduce,
            ("tensor",),
            weight_bytes,
            count * reductions,
            "gradients of norms",
        )


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
    adapter, model = partition.run.adapter, partition.run.model
    changed = (
        *adapter.adapted_layers(model),
        *adapter.scaled_layers(model),
        *adapter.fully_trained_modules(model),
    )
    if _trains_embedding(partition) or "attention_norm" in changed:
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
        shards = mesh.sizes["shards"] * mesh.sizes["context"]
        for weight in partition.weights_by_kind()[1]:
            if weight.name in tied and weight.trainable:
                shard_rows = ceil(weight.shape[0] / shards)
                size = (
                    shard_rows * prod(weight.shape[1:]) * partition.run.precision.parameters.bytes
                )
                yield Collective(
                    CollectiveKind.all_reduce, ("pipeline",), size, 1, f"gradient of {weight.name}"
                )
