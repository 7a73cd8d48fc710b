"""What one rank of a mesh works on, in sizes: its layers, its weights, its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalewise.models.base import Part, Split, Weight

if TYPE_CHECKING:
    from scalewise.parallelism.mesh import Mesh
    from scalewise.run import Run


@dataclass(frozen=True)
class Share:
    """What one rank of a mesh works on, in sizes."""

    mesh: Mesh
    run: Run
    parts: tuple[Part, ...]

    @property
    def first(self) -> bool:
        """Returns whether the embedding is here."""
        return any(part.first for part in self.parts)

    @property
    def last(self) -> bool:
        """Returns whether the head is here."""
        return any(part.last for part in self.parts)

    @property
    def passes(self) -> int:
        """Returns how often a step goes through each layer."""
        pieces = self.mesh.pieces if self.mesh.sizes["pipeline"] > 1 else 1
        return self.run.accumulation * pieces

    @property
    def rows(self) -> int:
        """Returns the rows of one pass."""
        return self.run.trainer.micro_batch * self.run.accumulation // self.passes

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
        return self.rows * self.tokens * self.run.model.width * self.activation

    def weights(self) -> Iterator[Weight]:
        """Yields this rank's weights, as tensor parallelism has cut them."""
        return self._cut(weight for weight in self.run.census() if self._has(weight))

    def weights_by_kind(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Returns those of one block, and those outside of blocks."""
        block, rest = self.run.census_by_kind()
        return tuple(self._cut(block)), tuple(self._cut(filter(self._has, rest)))

    def _has(self, weight: Weight) -> bool:
        tied = self.run.model.tied_weights
        return any(_holds(part, weight, tied) for part in self.parts)

    def _cut(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        table, ranks = self.table, self.mesh.sizes["tensor"]
        for weight in weights:
            yield weight if ranks == 1 else _cut(weight, table, ranks)

    @property
    def halves(self) -> dict[str, Half]:
        """Returns how many layers of each half of a block are adapted, in their order."""
        own = self.run.model.tensor_split()
        halves: dict[str, Half] = {}
        for name, how in own.items():
            block, _, layer = name.partition("blocks.*.")
            if block or how not in (Split.column, Split.row):
                continue
            half = halves.setdefault(layer.split(".")[0], Half())
            adapted = f"{name}.lora_A.default" in self.table
            half.columns += adapted and how is Split.column
            half.rows += adapted and how is Split.row
        return halves

    @property
    def table(self) -> dict[str, Split]:
        """Returns how tensor parallelism cuts each module."""
        return self.run.adapter.tensor_split(self.run.model)


@dataclass
class Half:
    """The adapted layers of a block's attention, or of its feedforward."""

    columns: int = 0
    rows: int = 0


def share_of(mesh: Mesh, run: Run, rank: int) -> Share:
    """Returns what a rank of a mesh works on."""
    stages = run.model.stages(mesh.stages, run.data.sequence)
    return Share(mesh, run, tuple(stages[index] for index in mesh.stages_of(rank)))


def _holds(part: Part, weight: Weight, tied: frozenset[str]) -> bool:
    if weight.layer is not None:
        return weight.layer in part.layers
    if weight.role in ("embedding", "position"):
        return part.first or (part.last and weight.name in tied)
    return part.last


def how(weight: Weight, table: dict[str, Split]) -> Split | None:
    """Returns how a table says that the module of a weight is cut."""
    module = weight.name.rpartition(".")[0]
    pattern = module if weight.layer is None else module.replace(f".{weight.layer}.", ".*.", 1)
    return table.get(pattern)


def _cut(weight: Weight, table: dict[str, Split], ranks: int) -> Weight:
    """Returns the part of a weight that one tensor-parallel rank holds."""
    cut, shape = how(weight, table), weight.shape
    if cut in (Split.column, Split.vocabulary, Split.head):
        shape = (shape[0] // ranks, *shape[1:])
    elif cut is Split.row and len(shape) > 1:
        shape = (shape[0], shape[1] // ranks, *shape[2:])
    return replace(weight, shape=shape)
