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
    ``hides``: whether blocks are at work meanwhile, so that only its excess takes time.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    count: int
    what: str
    hides: bool = False


def mesh_collectives(mesh: MeshConfig, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
    """Returns what a rank of a mesh sends in one step.

    Exact but for shards inside a pipeline, whose weights are gathered once at the least.
    """
    share, held = partition_of(mesh, run, rank), mesh.stages_of(rank)
    found = [
        *_fsdp_collectives(share),
        *(_tensor_collectives(share) if mesh.sizes["tensor"] > 1 else ()),
        *(_context_collectives(share) if mesh.sizes["context"] > 1 else ()),
        *(_pipeline_collectives(share, held) if mesh.sizes["pipeline"] > 1 else ()),
        Collective(CollectiveKind.all_reduce, tuple(mesh.sizes), SCALAR, 1, "the gradient's norm"),
    ]
    return tuple(collective for collective in found if collective.count)


def _fsdp_collectives(share: RankPartition) -> Iterator[Collective]:
    """FSDP: a block's weights are gathered for forward and backward, its gradients scattered."""
    mesh, precision = share.mesh, share.run.precision
    ranks, replicas = mesh.sizes["shards"] * mesh.sizes["context"], mesh.sizes["replicate"]
    if ranks * replicas == 1:
        return
    mixed = precision.compute.bytes < precision.parameters.bytes
    gathered = precision.compute.bytes if mixed else precision.parameters.bytes
    reduced = SCALAR if mixed else precision.parameters.bytes
    block, rest = share.weights_by_kind()
    reductions = share.run.accumulation if mesh.reduce_each_micro_batch else 1
    for name, weights, layers in (("a block", block, share.layers), ("the rest", rest, 1)):
        if not weights:
            continue
        whole = _padded_bytes(weights, ranks, gathered)
        trained = _padded_bytes((w for w in weights if w.trainable), ranks, reduced)
        again = weights is block and mesh.reshard_after_forward
        uses = 2 + share.run.passes_asked if again else 1
        if ranks > 1:
            axes, gathers = ("shards", "context"), layers * share.passes * uses
            yield Collective(
                CollectiveKind.all_gather, axes, whole, gathers, f"weights of {name}", hides=True
            )
            size = trained
            yield Collective(
                CollectiveKind.reduce_scatter,
                axes,
                size,
                layers * reductions * bool(size),
                f"gradients of {name}",
                hides=True,
            )
        if ranks > 1:
            yield from _update_collectives(share, weights, layers, ranks)
        if replicas > 1:
            size = trained // ranks
            yield Collective(
                CollectiveKind.all_reduce,
                ("replicate",),
                size,
                layers * reductions * bool(size),
                f"gradients of {name}",
                hides=True,
            )


def _update_collectives(
    share: RankPartition, weights: Iterable[Weight], layers: int, ranks: int
) -> Iterator[Collective]:
    """What an optimizer gathers that looks at whole matrices."""
    held = share.run.precision.parameters.bytes
    gathered = [w for w in weights if w.trainable and share.run.optimizer.gathers(w)]
    sizes = Counter(weight.size(held, ranks) * ranks for weight in gathered)
    for size, count in sizes.items():
        axes, what = ("shards", "context"), "updates of matrices"
        yield Collective(CollectiveKind.all_gather, axes, size, layers * count, what)


def _padded_bytes(weights: Iterable[Weight], ranks: int, held: int) -> int:
    """Returns the bytes of weights, each cut by rows into equal shards; ``held``: of a number."""
    return sum(weight.size(held, ranks) * ranks for weight in weights)


def _tensor_collectives(share: RankPartition) -> Iterator[Collective]:
    """Megatron: two joins a block; sequence parallelism makes each a gather and a scatter."""
    mesh, passes, axes = share.mesh, share.passes, ("tensor",)
    layers, first, last = share.layers, share.first, share.last
    # Into each pair of matrices and out of it, forward and backward; the ends have one pair.
    joins = 4 * layers + first + last
    chunked = share.run.objective.loss_chunk is not None
    halves = tuple(share.halves.values())
    # Attention's sums are made again; those that end a block are not, unless something follows.
    follows = halves[-1].rows or share.run.model.normed_after
    again = share.recomputed[Recompute.full] * (1 + follows)
    without = _skipped_by_adapter(share)
    asked = share.run.asks_each_pass  # a pass forward, without the adapter
    sums = joins + again - (last and chunked) - without.scatters + asked * (2 * layers + first)
    # Vectors are put before tokens, and left out, where each rank has all.
    alone = (first + (last and not chunked)) * (share.run.adapter.ahead > 0)
    sums = passes * (sums - alone)
    yield Collective(
        CollectiveKind.all_reduce, axes, share.embedded, passes * alone, "sums of a text alone"
    )
    if mesh.sequence_parallel:
        gathers = joins + 2 * sum(share.recomputed.values()) - without.gathers
        gathers = passes * (gathers + asked * (2 * layers + last))
        yield Collective(CollectiveKind.all_gather, axes, share.residual, gathers, "tokens joined")
        yield Collective(
            CollectiveKind.reduce_scatter, axes, share.residual, sums, "sums cut by tokens"
        )
        yield from _replicated_grad_collectives(share)
    else:
        yield Collective(CollectiveKind.all_reduce, axes, share.residual, sums, "sums")
    yield from _lora_collectives(share, layers)
    if last:
        yield from _loss_collectives(share)


@dataclass(frozen=True)
class SkippedCollectives:
    """Messages of a pass through the first block that no weight before them asks for."""

    gathers: int = 0
    scatters: int = 0


def _skipped_by_adapter(share: RankPartition) -> SkippedCollectives:
    """Returns what an adapter spares: gradients go back to the first weights that it added."""
    if not (share.first and share.run.is_frozen):
        return SkippedCollectives()
    asked = _trains_embedding(share)
    adapter = share.run.adapter
    embeds = adapter.ahead or "embedding" in adapter.whole(share.run.model)
    gathers, scatters = int(not embeds), 0
    for half in share.halves.values():
        asked = asked or half.norm
        gathers += not (asked or half.inside)
        scatters += not asked
        asked = asked or half.inside or half.rows > 0
    return SkippedCollectives(gathers, scatters)


def _trains_embedding(share: RankPartition) -> bool:
    """Returns whether what stands before the blocks is trained beside an adapter."""
    adapter = share.run.adapter
    trained = {"embedding", "position"} & {*adapter.whole(share.run.model)}
    return adapter.ahead > 0 or bool(trained)


def _lora_collectives(share: RankPartition, layers: int) -> Iterator[Collective]:
    """LoRA's narrow products: where the wide ones are joined, and where a column's rank is."""
    axes, passes = ("tensor",), layers * share.passes
    columns = sum(half.columns for half in share.halves.values()) * passes
    each = sum(half.rows for half in share.halves.values())
    rows, again = each * passes, each * share.recomputed[Recompute.full] * share.passes
    size = share.rows * share.tokens * share.run.adapter.rank * share.activation
    if share.mesh.sequence_parallel:
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
    if share.run.adapter.magnitudes:  # rows end in the residual stream
        size = share.run.model.width * SCALAR
        yield Collective(CollectiveKind.all_reduce, axes, size, rows + again, "norms of cut rows")


def _loss_collectives(share: RankPartition) -> Iterator[Collective]:
    """The loss from logits of which each tensor rank has a part, all at once or in pieces."""
    mesh, model, axes = share.mesh, share.run.model, ("tensor",)
    objective = share.run.objective
    chunk, again = objective.loss_chunk, not objective.in_forward(share.run)
    pieces = {share.tokens: 1}
    if chunk is not None:
        each = max(1, chunk // share.rows)
        pieces = {each: share.tokens // each, share.tokens % each: 1}
    for tokens, number in pieces.items():
        count = number * share.passes * bool(tokens)
        labels = share.rows * tokens
        runs = (2 if chunk is not None and again else 1) + share.run.asks_each_pass
        if mesh.loss_parallel:
            size, sums = labels * SCALAR, 3 * runs * count
            yield Collective(
                CollectiveKind.all_reduce, axes, size, sums, "the loss from cut logits"
            )
        else:
            size = labels * model.vocabulary * share.activation
            yield Collective(CollectiveKind.all_gather, axes, size, runs * count, "logits")
        if chunk is not None:
            size = labels * model.width * share.activation
            yield Collective(CollectiveKind.all_reduce, axes, size, count, "gradients of a piece")


def _replicated_grad_collectives(share: RankPartition) -> Iterator[Collective]:
    """Gradients of weights that see some of the tokens on each rank: norms and positions."""
    table = share.table
    size = share.run.precision.parameters.bytes
    ranks = share.mesh.sizes
    shards = ranks["shards"] * ranks["context"] * ranks["replicate"]
    reductions = share.passes
    if shards > 1 and not share.mesh.reduce_each_micro_batch:
        reductions = share.passes // share.run.accumulation
    sizes: dict[int, int] = {}
    block, rest = share.weights_by_kind()
    for weight, layers in [*((it, share.layers) for it in block), *((it, 1) for it in rest)]:
        cut = tp_style(weight, table) if weight.trainable else None
        if cut is TPStyle.tokens:
            sizes[weight.count * size] = sizes.get(weight.count * size, 0) + layers
        elif cut is TPStyle.places:
            whole = share.tokens * share.run.model.width * share.activation
            yield Collective(
                CollectiveKind.all_gather,
                ("tensor",),
                whole,
                share.passes,
                "gradients of positions",
            )
    for each, count in sizes.items():
        yield Collective(
            CollectiveKind.all_reduce, ("tensor",), each, count * reductions, "gradients of norms"
        )


def _context_collectives(share: RankPartition) -> Iterator[Collective]:
    """Ulysses sends queries, keys, values and results; gathering sends keys and values."""
    mesh, model, axes = share.mesh, share.run.model, ("context",)
    without = _skipped_in_first_block(share)
    layers = share.layers * share.passes
    again = sum(share.recomputed.values()) * share.passes
    token = share.rows * share.tokens * share.activation // mesh.sizes["tensor"]
    query, key = token * model.query_width, token * model.kv_width
    if mesh.attention == "gather":
        size = 2 * key * mesh.sizes["context"]
        yield Collective(CollectiveKind.all_gather, axes, size, layers + again, "keys and values")
        scatters = layers - share.passes * ({"key", "value"} <= without)
        yield Collective(CollectiveKind.reduce_scatter, axes, size, scatters, "their gradients")
        return
    if (model.key_heads // mesh.sizes["tensor"]) % mesh.sizes["context"]:
        key = query  # each query head brings its own
    both = "and their gradients"
    sent = 4 * layers + 2 * share.recomputed[Recompute.full] * share.passes
    queries = sent - share.passes * (("query" in without) + ("mixed" in without))
    keys = sent - share.passes * (("key" in without) + ("value" in without))
    yield Collective(CollectiveKind.all_to_all, axes, query, queries, f"queries, results {both}")
    yield Collective(CollectiveKind.all_to_all, axes, key, keys, f"keys, values {both}")


def _skipped_in_first_block(share: RankPartition) -> set[str]:
    """Returns what attention of the first block takes no gradient of, before any adapter."""
    if not (share.first and share.run.is_frozen):
        return set()
    adapter, model = share.run.adapter, share.run.model
    changed = (*adapter.adapted(model), *adapter.scaled(model), *adapter.whole(model))
    if _trains_embedding(share) or "attention_norm" in changed:
        return set()
    inputs = {"query", "key", "value"}
    idle = {name for name in inputs if f"attention.{name}" not in changed}
    return idle | ({"mixed"} if idle == inputs else set())


def _pipeline_collectives(share: RankPartition, held: Iterable[int]) -> Iterator[Collective]:
    """Activations to the next stage, their gradients to the one before, the loss to all."""
    mesh, held = share.mesh, set(held)
    cut = mesh.sizes["tensor"] if mesh.sequence_parallel else 1
    onward = sum(1 for stage in held if stage + 1 < mesh.stages and stage + 1 not in held)
    back = sum(1 for stage in held if stage > 0 and stage - 1 not in held)
    size, axes = share.residual // cut, ("pipeline",)
    yield Collective(CollectiveKind.send, axes, size, onward * share.passes, "activations")
    yield Collective(
        CollectiveKind.send, axes, size, back * share.passes, "gradients of activations"
    )
    size = SCALAR * len(share.run.objective.keys)
    yield Collective(CollectiveKind.all_reduce, axes, size, share.run.accumulation, "the loss")
    tied = share.run.model.tied_weights
    ends = (share.first, share.last)
    if tied and any(ends) and not all(ends):
        shards = mesh.sizes["shards"] * mesh.sizes["context"]
        for weight in share.weights_by_kind()[1]:
            if weight.name in tied and weight.trainable:
                rows = ceil(weight.shape[0] / shards)
                size = rows * prod(weight.shape[1:]) * share.run.precision.parameters.bytes
                yield Collective(
                    CollectiveKind.all_reduce, ("pipeline",), size, 1, f"gradient of {weight.name}"
                )
