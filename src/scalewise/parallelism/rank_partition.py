"""What one rank of a mesh works on, in sizes: its layers, its weights, its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.adapters.config import AdapterConfig
from scalewise.models.base import ModelConfig, StageSlice, TPStyle, Weight
from scalewise.quantization.config import QuantizationConfig, weight_census_by_kind

if TYPE_CHECKING:
    from scalewise.parallelism.mesh import MeshConfig
    from scalewise.run_config import RunConfig


@dataclass(frozen=True)
class RankStages:
    """The parts of a model that one rank has: one, or the stages of a pipeline."""

    stages: tuple[StageSlice, ...]

    @property
    def has_embedding(self) -> bool:
        """Returns whether the embedding is here."""
        return any(part.is_first for part in self.stages)

    @property
    def has_head(self) -> bool:
        """Returns whether the head is here."""
        return any(part.is_last for part in self.stages)

    @property
    def num_layers(self) -> int:
        """Returns the blocks of this rank."""
        return sum(len(part.layers) for part in self.stages)


@dataclass(frozen=True)
class RankPartition(RankStages):
    """What one rank of a mesh works on, in sizes."""

    mesh: MeshConfig
    run: RunConfig

    @property
    def forward_passes(self) -> int:
        """Returns how often a step goes through each layer."""
        pieces = self.mesh.num_pipeline_micro_batches if self.mesh.sizes["pipeline"] > 1 else 1
        return self.run.accumulation * pieces

    @property
    def sequences(self) -> int:
        """Returns the rows of one pass, those of pairs two by two."""
        return self.run.sequences_per_forward * self.run.accumulation // self.forward_passes

    @property
    def tokens_per_sequence(self) -> int:
        """Returns the tokens of a row, before sequence parallelism."""
        return self.run.data.sequence // self.mesh.sizes["context"]

    @property
    def activation_element_bytes(self) -> int:
        """Returns the bytes of one number between layers."""
        return self.run.precision.compute.bytes

    @property
    def residual_bytes(self) -> int:
        """Returns the bytes of ``x_BTW`` between two layers."""
        return (
            self.embedding_bytes
            // self.tokens_per_sequence
            * (self.tokens_per_sequence + self.run.adapter.prompt_tokens)
        )

    @property
    def embedding_bytes(self) -> int:
        """Returns the bytes of the embedded tokens, without what an adapter puts before them."""
        return (
            self.sequences
            * self.tokens_per_sequence
            * self.run.model.width
            * self.activation_element_bytes
        )

    @property
    def recomputed_layers(self) -> Counter[Recompute]:
        """Returns the layers that run forward twice, by how much of them does."""
        found = Counter(self.run.memory.recompute_per_layer(self.stages))
        del found[Recompute.nothing]
        return found

    def weights_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Returns the weights of one block and those outside of blocks, cut as on this rank."""
        run = self.run
        tensor = self.mesh.sizes["tensor"]
        block, rest = _shard_by_kind(run.quantization, run.adapter, run.model, tensor)
        return block, tuple(filter(self._stores, rest))

    def _stores(self, weight: Weight) -> bool:
        tied = self.run.model.tied_weights
        return any(_is_in_stage(part, weight, tied) for part in self.stages)

    @property
    def adapted_halves(self) -> dict[str, AdaptedHalf]:
        """Returns how many layers of each half of a block are changed, in their order."""
        return _adapted_halves(self.run.adapter, self.run.model)

    @property
    def tensor_parallel_styles(self) -> dict[str, TPStyle]:
        """Returns how tensor parallelism cuts each module."""
        return _module_table(self.run.adapter, self.run.model)


@dataclass
class AdaptedHalf:
    """The adapted layers of a block's attention, or of its feedforward, and those scaled.

    ``fully_trained_layers``: layers trained themselves; ``trains_norm``: whether the norm before
    them is; ``has_prefix``: whether keys and values are learnt that stand before others.
    """

    adapted_column_layers: int = 0
    adapted_row_layers: int = 0
    scaled_layers: int = 0
    fully_trained_layers: int = 0
    trains_norm: bool = False
    has_prefix: bool = False

    @property
    def trains_before_output(self) -> bool:
        """Returns whether something is trained before the last product, or beside it."""
        return bool(
            self.adapted_column_layers
            or self.scaled_layers
            or self.fully_trained_layers
            or self.has_prefix
        )


def partition_of(mesh: MeshConfig, run: RunConfig, rank: int) -> RankPartition:
    """Returns what a rank of a mesh works on."""
    stages = split_stages(run.model, mesh.num_stages, run.data.sequence)
    return RankPartition(tuple(stages[index] for index in mesh.stage_indices(rank)), mesh, run)


# A search asks for the shares of thousands of runs that differ in little.
@lru_cache(maxsize=64)
def _module_table(adapter: AdapterConfig, model: ModelConfig) -> dict[str, TPStyle]:
    return adapter.tensor_parallel_styles(model)


@lru_cache(maxsize=256)
def split_stages(model: ModelConfig, count: int, sequence: int) -> Sequence[StageSlice]:
    """Returns the parts of a model that is cut into ``count`` stages."""
    return model.split_stages(count, sequence)


@lru_cache(maxsize=256)
def _shard_by_kind(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig, ranks: int
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    table = _module_table(adapter, model)
    block, rest = weight_census_by_kind(quantization, adapter, model)
    if ranks == 1:
        return block, rest
    return tuple(shard_weight(w, table, ranks) for w in block), tuple(
        shard_weight(w, table, ranks) for w in rest
    )


@lru_cache(maxsize=64)
def _adapted_halves(adapter: AdapterConfig, model: ModelConfig) -> dict[str, AdaptedHalf]:
    halves: dict[str, AdaptedHalf] = {}
    for name, how in model.tensor_parallel_styles().items():
        block, _, layer = name.partition("blocks.*.")
        if block or how not in (TPStyle.column, TPStyle.row):
            continue
        first = layer.split(".")[0]
        half = halves.setdefault(
            first, AdaptedHalf(trains_norm=f"{first}_norm" in adapter.fully_trained_modules(model))
        )
        half.has_prefix |= adapter.prefix_tokens > 0 and first == "attention"
        adapted = layer in adapter.adapted_layers(model)
        half.scaled_layers += layer in adapter.scaled_layers(model)
        half.fully_trained_layers += layer in adapter.fully_trained_modules(model)
        half.adapted_column_layers += adapted and how is TPStyle.column
        half.adapted_row_layers += adapted and how is TPStyle.row
    return halves


def _is_in_stage(stage: StageSlice, weight: Weight, tied: frozenset[str]) -> bool:
    if weight.layer is not None:
        return weight.layer in stage.layers
    if weight.role in ("embedding", "position"):
        return stage.is_first or (stage.is_last and weight.name in tied)
    return stage.is_last


def tp_style(weight: Weight, tp_styles: Mapping[str, TPStyle]) -> TPStyle | None:
    """Returns how a table says that the module of a weight is cut."""
    module = weight.name.rpartition(".")[0]
    pattern = module if weight.layer is None else module.replace(f".{weight.layer}.", ".*.", 1)
    return tp_styles.get(pattern)


def shard_weight(weight: Weight, tp_styles: Mapping[str, TPStyle], ranks: int) -> Weight:
    """Returns the part of a weight that one tensor-parallel rank holds."""
    side, shape = tp_style(weight, tp_styles), weight.shape
    if side in (TPStyle.column, TPStyle.vocabulary, TPStyle.head):
        shape = (shape[0] // ranks, *shape[1:])
    elif side is TPStyle.row and len(shape) > 1:
        shape = (shape[0], shape[1] // ranks, *shape[2:])
    return replace(weight, shape=shape)
