"""Partition of one rank of a mesh: its layers, weights and tokens, as sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, singledispatch
from math import ceil

from scalewise.adapters.config import AdapterConfig
from scalewise.cached_hash import cache_hash
from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import (
    ModelConfig,
    StageSlice,
    TPStyle,
    Weight,
    WeightGroup,
    shard_weight,
)
from scalewise.models.decoder.kinds import Residual
from scalewise.models.op_graph import Recompute
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.adapted_layers import (
    AdaptedBlock,
    FrozenSublayer,
    adapted_blocks,
    sublayers_without_gradient,
)
from scalewise.planner.last_run import remember_last_run
from scalewise.quantization.config import (
    QuantizationConfig,
    weight_census_by_kind,
    weights_by_block,
)
from scalewise.run_config import RunConfig

EMPTY = WeightGroup()


@dataclass(frozen=True)
class RankStages:
    """Pipeline stages of one rank; without a pipeline, the whole model."""

    stages: tuple[StageSlice, ...]
    """Stages, in order."""

    @cached_property
    def has_embedding(self) -> bool:
        """Whether the rank stores the embedding."""
        return any(stage.is_first for stage in self.stages)

    @cached_property
    def has_head(self) -> bool:
        """Whether the rank stores the head."""
        return any(stage.is_last for stage in self.stages)

    @cached_property
    def num_layers(self) -> int:
        """Number of blocks of the rank."""
        return sum(len(stage.layers) for stage in self.stages)


@dataclass(frozen=True)
class RankPartition(RankStages):
    """Partition of one rank of a mesh."""

    mesh: MeshConfig
    """Mesh."""
    run: RunConfig
    """Run on the mesh."""

    @cached_property
    def forward_passes(self) -> int:
        """Number of forward passes through each layer per step."""
        num_micro_batches = (
            self.mesh.num_pipeline_micro_batches if self.mesh.sizes["pipeline"] > 1 else 1
        )
        return self.run.accumulation * num_micro_batches

    @cached_property
    def sequences(self) -> int:
        """Number of sequences of one forward pass, rounded up; a preference pair counts as two."""
        return ceil(self.run.sequences_per_forward * self.run.accumulation / self.forward_passes)

    @property
    def tokens_per_sequence(self) -> int:
        """Number of tokens of a sequence on the rank, before sequence parallelism."""
        return self.run.data.sequence // self.mesh.sizes["context"]

    @property
    def activation_element_bytes(self) -> int:
        """Bytes per element of activations between layers."""
        return self.run.precision.compute.bytes

    @property
    def residual_bytes(self) -> int:
        """Size of the residual stream ``x_BTW``, in bytes."""
        return (
            self.embedding_bytes
            // self.tokens_per_sequence
            * (self.tokens_per_sequence + self.run.adapter.prompt_tokens)
        )

    @property
    def embedding_bytes(self) -> int:
        """Size of the token embeddings, without prompt tokens, in bytes."""
        return (
            self.sequences
            * self.tokens_per_sequence
            * self.run.model.width
            * self.activation_element_bytes
        )

    @cached_property
    def recomputed_layers(self) -> Counter[Recompute]:
        """Number of recomputed layers, by recomputation."""
        layers = Counter(recompute_per_layer(self.run.memory, self.stages))
        del layers[Recompute.nothing]
        return layers

    def weights_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Return the weights of one block and those outside of blocks, after tensor parallelism."""
        block, groups = self._weights
        return block, groups.all

    def weights_by_block(self) -> tuple[tuple[Weight, ...], ...]:
        """Return the weights of each block of this rank; empty for models with equal blocks."""
        run, ranks = self.run, (self.mesh.sizes["tensor"], self.mesh.expert)
        blocks = _sharded_blocks(run.quantization, run.adapter, run.model, *ranks)
        layers = (layer for stage in self.stages for layer in stage.layers)
        return tuple(blocks[layer] for layer in layers) if blocks else ()

    def fsdp_groups(self) -> FSDPGroups:
        """Return the weights outside of blocks by FSDP group, after tensor parallelism."""
        return self._weights[1]

    @cached_property
    def _weights(self) -> tuple[WeightGroup, FSDPGroups]:
        run, ranks = self.run, (self.mesh.sizes["tensor"], self.mesh.expert)
        return _rank_weights(run.quantization, run.adapter, run.model, *ranks, self.stages)

    @property
    def trains_embedding(self) -> bool:
        """Whether an adapter run trains weights before the blocks."""
        adapter = self.run.adapter
        trained = {"embedding", "position"} & {*adapter.fully_trained_modules(self.run.model)}
        return adapter.prompt_tokens > 0 or bool(trained)

    @property
    def adapted_blocks(self) -> tuple[AdaptedBlock, ...]:
        """Adapted layers of the blocks of this rank, in their order."""
        return adapted_blocks(self.run.adapter, self.run.model, self.stages)

    @property
    def sublayers_without_gradient(self) -> Iterator[FrozenSublayer]:
        """Sublayers before the first trained weight, whose input needs no gradient."""
        if self.has_embedding and self.run.has_frozen_weights and not self.trains_embedding:
            residual = getattr(self.run.model, "residual", Residual.sequential)
            yield from sublayers_without_gradient(self.adapted_blocks, residual)

    @property
    def recomputed_blocks(self) -> tuple[tuple[Recompute, AdaptedBlock], ...]:
        """Recomputed blocks; those before all trained weights have no backward pass."""
        *_, without_backward = (0, *(it.block for it in self.sublayers_without_gradient))
        kinds = recompute_per_layer(self.run.memory, self.stages)
        blocks = [*zip(kinds, self.adapted_blocks, strict=True)]
        return tuple(it for it in blocks[without_backward:] if it[0] is not Recompute.nothing)

    @property
    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Tensor parallel style of each module."""
        return _tensor_parallel_styles(self.run.adapter, self.run.model)


@cache_hash
@dataclass(frozen=True)
class FSDPGroups:
    """Weights outside of blocks that a rank stores, by the FSDP group that gathers them."""

    all: WeightGroup
    """Weights of all groups."""
    root: WeightGroup
    """Weights that no other group contains, of all stages."""
    stage_roots: tuple[WeightGroup, ...]
    """The same by pipeline stage; each stage is gathered by itself."""
    embedding: WeightGroup = EMPTY
    """Token embedding, unless the head shares it."""
    head: WeightGroup = EMPTY
    """Head, unless it shares the weight of the embedding."""


def partition_of(mesh: MeshConfig, run: RunConfig, rank: int) -> RankPartition:
    """Return the partition of a rank of a mesh."""
    return _last_partition(run, rank) if mesh is run.parallelism else _partition(mesh, run, rank)


@remember_last_run
def _last_partition(run: RunConfig, rank: int) -> RankPartition:
    assert isinstance(run.parallelism, MeshConfig)
    return _partition(run.parallelism, run, rank)


def _partition(mesh: MeshConfig, run: RunConfig, rank: int) -> RankPartition:
    indices = tuple(mesh.stage_indices(rank))
    stages = _select_stages(run.model, mesh.num_stages, run.data.sequence, indices)
    return RankPartition(stages, mesh, run)


@singledispatch
def list_distinct_ranks(config: ParallelismConfig, run: RunConfig) -> tuple[int, ...]:
    """Return one rank of each distinct partition; without registration, all ranks are equal."""
    return (0,)


@list_distinct_ranks.register
def _list_distinct_mesh_ranks(config: MeshConfig, run: RunConfig) -> tuple[int, ...]:
    """Return the first rank of each distinct set of pipeline stages.

    Stages differ by their number of layers, embedding and head. Of equal ranks, the first has
    the most forward passes waiting for their backward, unless backward is split: then later ranks
    defer more weight gradients, and all are distinct.
    """
    stages = split_stages(run.model, config.num_stages, run.data.sequence)
    rank_by_stages: dict[object, int] = {}
    for pipeline_rank in range(config.sizes["pipeline"]):
        rank = pipeline_rank * config.world_size // config.sizes["pipeline"]
        rank_stages = [stages[index] for index in config.stage_indices(rank)]
        key = tuple((len(stage.layers), stage.is_first, stage.is_last) for stage in rank_stages)
        rank_by_stages.setdefault((key, rank) if config.splits_backward else key, rank)
    return tuple(rank_by_stages.values())


# Cached: a search partitions thousands of runs that differ in little.
@lru_cache(maxsize=64)
def _tensor_parallel_styles(adapter: AdapterConfig, model: ModelConfig) -> dict[str, TPStyle]:
    return adapter.tensor_parallel_styles(model)


@lru_cache(maxsize=256)
def split_stages(model: ModelConfig, count: int, sequence: int) -> Sequence[StageSlice]:
    """Return the ``count`` pipeline stages of a model."""
    return model.split_stages(count, sequence)


@lru_cache(maxsize=1024)
def _select_stages(
    model: ModelConfig, count: int, sequence: int, indices: tuple[int, ...]
) -> tuple[StageSlice, ...]:
    """Return some of the pipeline stages of a model."""
    stages = split_stages(model, count, sequence)
    return tuple(stages[index] for index in indices)


@lru_cache(maxsize=1024)
def recompute_per_layer(
    memory: ActivationCheckpointing, stages: tuple[StageSlice, ...]
) -> tuple[Recompute, ...]:
    """Return the recompute mode of each layer of some pipeline stages, in order."""
    return memory.recompute_per_layer(stages)


@lru_cache(maxsize=1024)
def _rank_weights(
    quantization: QuantizationConfig,
    adapter: AdapterConfig,
    model: ModelConfig,
    ranks: int,
    expert_ranks: int,
    stages: tuple[StageSlice, ...],
) -> tuple[WeightGroup, FSDPGroups]:
    """Return the weights of one block and those outside of blocks that a rank stores."""
    styles, tied = _tensor_parallel_styles(adapter, model), model.tied_weights
    block, other = weight_census_by_kind(quantization, adapter, model)
    groups: dict[str, list[Weight]] = {name: [] for name in ("all", *model.end_modules, "root")}
    roots: list[list[Weight]] = [[] for _ in stages]
    for weight in other:
        owners = (name for name in model.end_modules if weight.name.startswith(f"{name}."))
        owner = next(owners, "root")
        sharded = shard_weight(weight, styles, ranks) if ranks > 1 else weight
        # The first and the last stage of a V-shaped schedule each have a copy of a tied weight.
        for stage, root in zip(stages, roots, strict=True):
            if _is_in_stage(stage, weight, tied):
                groups["all"].append(sharded)
                groups[owner].append(sharded)
                if owner == "root":
                    root.append(sharded)
    every, *ends, rest = (_unique(WeightGroup(weights)) for weights in groups.values())
    stage_roots = tuple(_unique(WeightGroup(root)) for root in roots if root)
    groups_of_ends = FSDPGroups(every, rest, stage_roots, *ends)
    return _shard_block(block, styles, ranks, expert_ranks), groups_of_ends


def _shard_block(
    block: Iterable[Weight], styles: Mapping[str, TPStyle], ranks: int, expert_ranks: int
) -> WeightGroup:
    """Return the weights of a block after tensor and expert parallelism."""
    weights = [shard_weight(weight, styles, ranks) if ranks > 1 else weight for weight in block]
    return _unique(WeightGroup(_rank_experts(weight, expert_ranks) for weight in weights))


def _rank_experts(weight: Weight, ranks: int) -> Weight:
    """Return the experts that one of ``ranks`` ranks stores; other weights unchanged."""
    if weight.role != "experts" or ranks == 1:
        return weight
    shape = (weight.shape[0] // ranks, *weight.shape[1:])
    return replace(weight, shape=shape, expert_ranks=ranks)


@lru_cache(maxsize=256)
def _sharded_blocks(
    quantization: QuantizationConfig,
    adapter: AdapterConfig,
    model: ModelConfig,
    ranks: int,
    expert_ranks: int,
) -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of each block that a rank stores, of models with unequal blocks."""
    blocks = weights_by_block(quantization, adapter, model)
    if ranks * expert_ranks == 1:
        return blocks
    styles = _tensor_parallel_styles(adapter, model)
    return tuple(_shard_block(block, styles, ranks, expert_ranks) for block in blocks)


@lru_cache(maxsize=1024)
def _unique(weights: WeightGroup) -> WeightGroup:
    """Return one object for all equal groups, which are then compared by identity."""
    return weights


def _is_in_stage(stage: StageSlice, weight: Weight, tied: frozenset[str]) -> bool:
    if weight.layer is not None:
        return weight.layer in stage.layers
    if weight.role in ("embedding", "position"):
        return stage.is_first or (stage.is_last and weight.name in tied)
    return stage.is_last
