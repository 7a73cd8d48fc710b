"""Collectives of FSDP in one optimizer step: gathers of parameters, reductions of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from scalewise.models.base import Weight
from scalewise.parallelism.collective import Collective, CollectiveKind
from scalewise.planner.rank_partition import RankPartition
from scalewise.planner.tensor_communication import SCALAR_BYTES
from scalewise.planner.weight_sizes import gathered_bytes, padded_elements


@dataclass(frozen=True)
class GathersPerStep:
    """Number of times that FSDP gathers the weights of a part in an optimizer step."""

    block: int
    """A block."""
    embedding: int
    """The embedding, which backward does not read."""
    last: int
    """The head and the weights outside of other groups, which stay unsharded after forward."""


def _gathers_per_step(partition: RankPartition) -> GathersPerStep:
    """Gathers of each part: in a pipeline, only what forward frees is gathered again.

    The schedule of a pipeline reshards nothing after backward, but all at its end. With
    ``frees_after_forward``, a block is gathered before its first use and again after each forward,
    in any order of passes.
    """
    mesh, accumulation = partition.mesh, partition.run.accumulation
    steps = 1 if mesh.gathers_once and mesh.sizes["pipeline"] == 1 else accumulation
    if not mesh.frees_after_forward:
        return GathersPerStep(steps, steps, steps)
    passes = partition.forward_passes
    if mesh.sizes["pipeline"] > 1:
        return GathersPerStep(passes + accumulation, passes, accumulation)
    forwards = passes * (1 + partition.run.extra_forward_passes)
    return GathersPerStep(forwards + passes, forwards, passes)


def fsdp_collectives(partition: RankPartition) -> Iterator[Collective]:
    """FSDP: gathers of parameters for forward and backward, and reductions of gradients."""
    mesh, precision = partition.mesh, partition.run.precision
    ranks, replicas = mesh.parameter_shards, mesh.sizes["replicate"]
    if ranks * replicas == 1:
        return
    mixed = precision.compute.bytes < precision.parameters.bytes
    gathered_element_bytes = precision.compute.bytes if mixed else precision.parameters.bytes
    reduced_element_bytes = SCALAR_BYTES if mixed else precision.parameters.bytes
    (block, _), groups = partition.weights_by_kind(), partition.fsdp_groups()
    reductions = 1 if mesh.delays_reduction else partition.run.accumulation
    gathers = _gathers_per_step(partition)
    blocks = Counter(partition.weights_by_block()) or {block: partition.num_layers}
    counts = [(*_split_experts(each), count) for each, count in blocks.items()]
    # Nothing runs before the embedding and the rest are gathered, or after their last gradient.
    for name, weights, layers, num_gathers, overlaps in (
        *(("a block", it, count, gathers.block, True) for it, _, count in counts),
        *(("the experts of a block", it, count, gathers.block, True) for _, it, count in counts),
        ("the embedding", groups.embedding, 1, gathers.embedding, False),
        ("the head", groups.head, 1, gathers.last, True),
        *(("the rest", root, 1, gathers.last, False) for root in groups.stage_roots),
    ):
        if not weights:
            continue
        axes = ("expert_shards",) if weights[0].expert_ranks > 1 else ("shards", "context")
        reduced_bytes = padded_elements(weights, ranks) * reduced_element_bytes
        num_shards = weights[0].num_shards(ranks)
        if num_shards > 1:
            yield Collective(
                CollectiveKind.all_gather,
                axes,
                gathered_bytes(weights, gathered_element_bytes, ranks),
                layers * num_gathers,
                f"weights of {name}",
                overlaps=overlaps,
            )
            yield Collective(
                CollectiveKind.reduce_scatter,
                axes,
                reduced_bytes,
                layers * reductions * bool(reduced_bytes),
                f"gradients of {name}",
                overlaps=overlaps,
            )
        if replicas > 1:
            yield Collective(
                CollectiveKind.all_reduce,
                ("replicate",),
                reduced_bytes // num_shards,
                layers * reductions * bool(reduced_bytes),
                f"gradients of {name}",
                overlaps=overlaps,
            )


@lru_cache(maxsize=1024)
def _split_experts(
    weights: tuple[Weight, ...],
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Return the weights of a block that all ranks gather, and those that expert ranks divide."""
    experts = tuple(weight for weight in weights if weight.expert_ranks > 1)
    return tuple(weight for weight in weights if weight not in experts), experts
