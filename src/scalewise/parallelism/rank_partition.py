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

    parts: tuple[StageSlice, ...]

    @property
    def first(self) -> bool:
        """Returns whether the embedding is here."""
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        """Returns whether the head is here."""
        return any(part.last for part in self.parts)

    @property
    def layers(self) -> int:
        """Returns the blocks of this rank."""
        return sum(len(part.layers) for part in self.parts)


@dataclass(frozen=True)
class RankPartition(RankStages):
    """What one rank of a mesh works on, in sizes."""

    mesh: MeshConfig
    run: RunConfig

    @property
    def passes(self) -> int:
        """Returns how often a step goes through each layer."""
        pieces = self.mesh.pieces if self.mesh.sizes["pipeline"] > 1 else 1
        return self.run.accumulation * pieces

    @property
    def rows(self) -> int:
        """Returns the rows of one pass, those of pairs two by two."""
        return self.run.sequences_per_pass * self.run.accumulation // self.passes

    @property
    def tokens(self) -> int:
        """Returns the tokens of a row, before sequence parallelism."""
        return self.run.data.sequence // self.mesh.sizes["context"]

    @property
    def activation(self) -> int:
        """Returns the bytes of one number between layers."""
        return self.run.precision.compute.bytes

    @property
    def residual(self) -> int:
        """Returns the bytes of ``x_BTW`` between two layers."""
        return self.embedded // self.tokens * (self.tokens + self.run.adapter.ahead)

    @property
    def embedded(self) -> int:
        """Returns the bytes of the embedded tokens, without what an adapter puts before them."""
        return self.rows * self.tokens * self.run.model.width * self.activation

    @property
    def recomputed(self) -> Counter[Recompute]:
        """Returns the layers that run forward twice, by how much of them does."""
        found = Counter(self.run.memory.of_parts(self.parts))
        del found[Recompute.nothing]
        return found

    def weights_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Returns the weights of one block and those outside of blocks, cut as on this rank."""
        run = self.run
        tensor = self.mesh.sizes["tensor"]
        block, rest = _shard_by_kind(run.quantization, run.adapter, run.model, tensor)
        return block, tuple(filter(self._has, rest))

    def _has(self, weight: Weight) -> bool:
        tied = self.run.model.tied_weights
        return any(_is_in_stage(part, weight, tied) for part in self.parts)

    @property
    def halves(self) -> dict[str, AdaptedHalf]:
        """Returns how many layers of each half of a block are changed, in their order."""
        return _adapted_halves(self.run.adapter, self.run.model)

    @property
    def table(self) -> dict[str, TPStyle]:
        """Returns how tensor parallelism cuts each module."""
        return _module_table(self.run.adapter, self.run.model)


@dataclass
class AdaptedHalf:
    """The adapted layers of a block's attention, or of its feedforward, and those scaled.

    ``whole``: layers trained themselves; ``norm``: whether the norm before them is; ``before``:
    whether keys and values are learnt that stand before others.
    """

    columns: int = 0
    rows: int = 0
    scaled: int = 0
    whole: int = 0
    norm: bool = False
    before: bool = False

    @property
    def inside(self) -> bool:
        """Returns whether something is trained before the last product, or beside it."""
        return bool(self.columns or self.scaled or self.whole or self.before)


def partition_of(mesh: MeshConfig, run: RunConfig, rank: int) -> RankPartition:
    """Returns what a rank of a mesh works on."""
    stages = split_stages(run.model, mesh.stages, run.data.sequence)
    return RankPartition(tuple(stages[index] for index in mesh.stages_of(rank)), mesh, run)


# A search asks for the shares of thousands of runs that differ in little.
@lru_cache(maxsize=64)
def _module_table(adapter: AdapterConfig, model: ModelConfig) -> dict[str, TPStyle]:
    return adapter.tensor_split(model)


@lru_cache(maxsize=256)
def split_stages(model: ModelConfig, count: int, sequence: int) -> Sequence[StageSlice]:
    """Returns the parts of a model that is cut into ``count`` stages."""
    return model.stages(count, sequence)


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
    for name, how in model.tensor_split().items():
        block, _, layer = name.partition("blocks.*.")
        if block or how not in (TPStyle.column, TPStyle.row):
            continue
        first = layer.split(".")[0]
        half = halves.setdefault(first, AdaptedHalf(norm=f"{first}_norm" in adapter.whole(model)))
        half.before |= adapter.before > 0 and first == "attention"
        adapted = layer in adapter.adapted(model)
        half.scaled += layer in adapter.scaled(model)
        half.whole += layer in adapter.whole(model)
        half.columns += adapted and how is TPStyle.column
        half.rows += adapted and how is TPStyle.row
    return halves


def _is_in_stage(part: StageSlice, weight: Weight, tied: frozenset[str]) -> bool:
    if weight.layer is not None:
        return weight.layer in part.layers
    if weight.role in ("embedding", "position"):
        return part.first or (part.last and weight.name in tied)
    return part.last


def tp_style(weight: Weight, table: Mapping[str, TPStyle]) -> TPStyle | None:
    """Returns how a table says that the module of a weight is cut."""
    module = weight.name.rpartition(".")[0]
    pattern = module if weight.layer is None else module.replace(f".{weight.layer}.", ".*.", 1)
    return table.get(pattern)


def shard_weight(weight: Weight, table: Mapping[str, TPStyle], ranks: int) -> Weight:
    """Returns the part of a weight that one tensor-parallel rank holds."""
    side, shape = tp_style(weight, table), weight.shape
    if side in (TPStyle.column, TPStyle.vocabulary, TPStyle.head):
        shape = (shape[0] // ranks, *shape[1:])
    elif side is TPStyle.row and len(shape) > 1:
        shape = (shape[0], shape[1] // ranks, *shape[2:])
    return replace(weight, shape=shape)
