"""Collectives of mixtures of experts in one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.op_graph import Recompute
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.planner.rank_partition import RankPartition

INT32_BYTES, INT64_BYTES = 4, 8


def expert_collectives(partition: RankPartition) -> Iterator[Collective]:
    """All-to-alls of tokens to their experts and back, of their gradients, and of their numbers.

    The load is balanced. Full activation checkpointing repeats those of forward. Biases that
    balance experts need the load of the global batch.
    """
    model, mesh, axes = partition.run.model, partition.mesh, ("expert",)
    if not isinstance(model, DecoderConfig) or not model.experts:
        return
    num_layers = sum(model.has_experts(it) for stage in partition.stages for it in stage.layers)
    for group in (("replicate",), ("shards", "context")):
        size = num_layers * model.routed_experts * INT64_BYTES
        ranks = prod(mesh.sizes[axis] for axis in group)
        count = int(model.balance_rate > 0 and ranks > 1)
        yield Collective(CollectiveKind.all_reduce, group, size, count, "load of experts")
    if mesh.expert == 1:
        return
    passes = partition.forward_passes
    forwards = num_layers * (1 + partition.run.runs_reference_forward)
    recomputed = Counter(
        kind for kind, block in partition.recomputed_blocks if block["feedforward"].has_experts
    )
    tokens = partition.sequences * partition.tokens_per_sequence
    row_bytes = model.width * partition.activation_element_bytes
    capacity = model.expert_capacity(tokens)
    rows = tokens * model.experts_per_token if capacity is None else model.routed_experts * capacity
    yield Collective(
        CollectiveKind.all_to_all,
        axes,
        rows * row_bytes,
        passes
        * (2 * (forwards + num_layers + recomputed[Recompute.full]) - _frozen_exchanges(partition)),
        "tokens of experts and their gradients",
    )
    size = model.routed_experts * INT32_BYTES
    counts = passes * (forwards + recomputed.total()) * (capacity is None)
    yield Collective(CollectiveKind.all_to_all, axes, size, counts, "number of tokens per expert")


def _frozen_exchanges(partition: RankPartition) -> int:
    """Return the all-to-alls of gradients that the experts of the first block do not need.

    Before all trained weights, their input has no gradient; nor has their output, unless one of
    their matrices is trained.
    """
    mixtures = [
        it.sublayer for it in partition.sublayers_without_gradient if it.sublayer.has_experts
    ]
    return sum(1 + (not it.trains_experts) for it in mixtures)


def changed_modules(partition: RankPartition) -> set[str]:
    """Return the modules of a block that the adapter adapts, scales or trains in full."""
    adapter, model = partition.run.adapter, partition.run.model
    return {
        *adapter.adapted_layers(model),
        *adapter.scaled_layers(model),
        *adapter.fully_trained_modules(model),
    }
