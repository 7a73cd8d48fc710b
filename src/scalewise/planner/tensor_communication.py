"""Collectives of tensor parallelism in one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.models.base import TPStyle, tp_style
from scalewise.models.op_graph import Recompute
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.planner.adapted_layers import AdaptedBlock
from scalewise.planner.rank_partition import RankPartition

SCALAR_BYTES = 4
"""Bytes of a loss or a norm."""
PARTIAL_GRADIENT_STYLES = (
    TPStyle.heads,
    TPStyle.router,
    TPStyle.partial_replicated,
    TPStyle.expert_replicated,
)
"""Styles of replicated weights of which each rank has a partial sum of the gradient."""


def tensor_collectives(partition: RankPartition) -> Iterator[Collective]:
    """Megatron-LM: two all-reduces per block, which sequence parallelism splits in two each."""
    mesh, passes, axes = partition.mesh, partition.forward_passes, ("tensor",)
    layers, first, last = partition.num_layers, partition.has_embedding, partition.has_head
    # Around each pair of matrices, in forward and backward; embedding and head form one pair.
    reductions = 4 * layers + first + last
    chunked = partition.run.objective.loss_chunk is not None
    recomputed_blocks = partition.recomputed_blocks
    recomputed = sum(
        _recomputed_reductions(partition, block)
        for kind, block in recomputed_blocks
        if kind is Recompute.full
    )
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
    all_reduces = (first + (last and not chunked)) * (partition.run.adapter.prompt_tokens > 0)
    if partition.run.model.embeds_all_tokens and mesh.sequence_parallel:
        all_reduces = int(first)
    reduce_scatters = passes * (reduce_scatters - all_reduces)
    yield Collective(
        CollectiveKind.all_reduce,
        axes,
        partition.embedding_bytes,
        passes * all_reduces,
        "sums of a text alone",
    )
    if mesh.sequence_parallel:
        all_gathers = reductions + 2 * len(recomputed_blocks) - skipped.all_gathers
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
    else:
        yield Collective(
            CollectiveKind.all_reduce, axes, partition.residual_bytes, reduce_scatters, "sums"
        )
    yield from _replicated_grad_collectives(partition)
    yield from _lora_collectives(partition)
    if last:
        yield from _loss_collectives(partition)


@dataclass(frozen=True)
class SkippedCollectives:
    """Collectives of the first blocks that a frozen base model does not need."""

    all_gathers: int = 0
    """Number of all-gathers."""
    reduce_scatters: int = 0
    """Number of reduce-scatters."""


def _skipped_by_adapter(partition: RankPartition) -> SkippedCollectives:
    """Return the collectives before the first trained weight, which needs no gradient of them."""
    if not (partition.has_embedding and partition.run.has_frozen_weights):
        return SkippedCollectives()
    adapter = partition.run.adapter
    trains_input = adapter.prompt_tokens or "embedding" in adapter.fully_trained_modules(
        partition.run.model
    )
    frozen = [*partition.sublayers_without_gradient]
    without_output_gradient = sum(not it.needs_output_gradient for it in frozen)
    return SkippedCollectives(int(not trains_input) + without_output_gradient, len(frozen))


def _recomputed_reductions(partition: RankPartition, block: AdaptedBlock) -> int:
    """Return the sums of partial outputs of a block that is recomputed.

    The attention output is recomputed; the block output is not, unless a layer follows it.
    """
    *_, last = block.values()
    return 1 + (last.adapted_row_layers > 0 or partition.run.model.has_post_norm)


def _lora_collectives(partition: RankPartition) -> Iterator[Collective]:
    """LoRA: collectives of row-parallel inputs and of column-parallel gradients."""
    axes, passes = ("tensor",), partition.forward_passes
    sublayers = [it for block in partition.adapted_blocks for it in block.values()]
    columns = passes * sum(it.adapted_column_layers for it in sublayers)
    rows = passes * sum(it.adapted_row_layers for it in sublayers)
    recomputed_rows = passes * sum(
        sublayer.adapted_row_layers
        for kind, block in partition.recomputed_blocks
        if kind is Recompute.full
        for sublayer in block.values()
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
            # Maximum, sum and log-probability of the label; the z-loss also reads its logit.
            reductions = 4 if getattr(objective, "z_loss", 0.0) else 3
            size, num_reductions = labels * SCALAR_BYTES, reductions * runs * count
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
    """Gradients of replicated weights that see a part of the tokens, heads or expert features."""
    has_token_shards = partition.mesh.sequence_parallel
    styles = partition.tensor_parallel_styles
    element_bytes = partition.run.precision.parameters.bytes
    ranks = partition.mesh.sizes
    shards = ranks["shards"] * ranks["context"] * ranks["replicate"]
    reductions = partition.forward_passes
    if shards > 1:  # FSDP accumulates partial sums until it reduces gradients
        reductions = 1 if partition.mesh.delays_reduction else partition.run.accumulation
    sizes: dict[int, int] = {}
    block, other = partition.weights_by_kind()
    blocks = Counter(partition.weights_by_block()) or {block: partition.num_layers}
    for weight, layers in [
        *((it, count) for weights, count in blocks.items() for it in weights),
        *((it, 1) for it in other),
    ]:
        style = tp_style(weight, styles) if weight.trainable else None
        is_partial = style in PARTIAL_GRADIENT_STYLES
        if is_partial or (style is TPStyle.tokens and has_token_shards):
            sizes[weight.numel * element_bytes] = (
                sizes.get(weight.numel * element_bytes, 0) + layers
            )
        elif style is TPStyle.positions and has_token_shards:
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
