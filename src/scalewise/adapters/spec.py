"""Adapters as specs: which weights they freeze and which they add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.config.near import meant
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

if TYPE_CHECKING:
    from scalewise.models.module import ModelModule

AUTO = "auto"


class Adapter(ABC):
    """What is trained of a model, as a spec."""

    rank: int = 0
    dropout: float = 0.0

    @abstractmethod
    def weights(self, model: Model) -> tuple[Weight, ...]:
        """Returns every tensor once, frozen or not, in the order of the module's parameters."""

    def adapted(self, model: Model) -> tuple[str, ...]:
        """Returns the layers that get matrices of ``rank`` beside them, by name within a block."""
        return ()

    def tensor_split(self, model: Model) -> dict[str, Split]:
        """Returns how tensor parallelism cuts each module with weights, added ones as well."""
        return model.tensor_split()

    def flops(self, model: Model, sequence: int) -> float:
        """Returns the flops of one forward and backward pass, per token, as ``Model.flops``."""
        return model.flops(sequence)

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range."""
        yield from ()

    def complaints_with(self, model: Model) -> Iterator[Complaint]:
        """Yields what ``model`` does not have."""
        yield from ()

    @abstractmethod
    def apply(self, module: ModelModule, model: Model) -> None:
        """Freezes and adds weights, in place, in a model or a part of it on the meta device."""

    @abstractmethod
    def fill(self, module: ModelModule, seed: int) -> None:
        """Gives the added weights of a materialized module, sharded or not, their first values."""


@lru_cache(maxsize=64)
def census(adapter: Adapter, model: Model) -> tuple[Weight, ...]:
    """Returns every weight of an adapted model once; a search asks a thousand times."""
    return adapter.weights(model)


@lru_cache(maxsize=64)
def census_by_kind(adapter: Adapter, model: Model) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Returns the weights of one block, all blocks being alike, and those outside of blocks."""
    whole = census(adapter, model)
    block = tuple(weight for weight in whole if weight.layer == 0)
    return block, tuple(weight for weight in whole if weight.layer is None)


@option("adapter", "none")
@dataclass(frozen=True)
class NoAdapter(Adapter):
    """Every weight is trained."""

    def weights(self, model: Model) -> tuple[Weight, ...]:
        """Returns the model's own."""
        return model.census()

    def apply(self, module: ModelModule, model: Model) -> None:
        """Changes nothing."""

    def fill(self, module: ModelModule, seed: int) -> None:
        """Has nothing to fill."""


@option("adapter", "lora")
@dataclass(frozen=True)
class Lora(Adapter):
    """``W x + alpha / rank * B A x`` with W frozen (Hu et al., 2021), by PEFT."""

    rank: int = 8
    """Rows of A and columns of B."""
    alpha: float = 16.0
    """Weight of the added product, times the rank."""
    dropout: float = 0.0
    """Share of A's inputs dropped while training."""
    targets: tuple[str, ...] = (AUTO,)
    """Linear layers, by their name within a block: ``attention.query``; auto: the model's own."""

    def adapted(self, model: Model) -> tuple[str, ...]:
        """Returns the targets."""
        return model.adapter_targets if self.targets == (AUTO,) else self.targets

    def weights(self, model: Model) -> tuple[Weight, ...]:
        """Returns the model's own, frozen, and after each target's its A and B."""
        return tuple(self._weights(model))

    def _weights(self, model: Model) -> Iterator[Weight]:
        added: list[Weight] = []
        for weight in model.census():
            module, _, kind = weight.name.rpartition(".")
            if kind == "weight":
                yield from added
                added = []
            yield replace(weight, trainable=False)
            if kind == "weight" and self._is_target(weight, model):
                out, into = weight.shape
                added = [
                    replace(weight, name=f"{module}.lora_{part}.default.weight", shape=shape)
                    for part, shape in (("A", (self.rank, into)), ("B", (out, self.rank)))
                ]
        yield from added

    def flops(self, model: Model, sequence: int) -> float:
        """Returns the model's, less what a frozen m x n layer spares: its gradient, 2 m n a token.

        An added layer of m x n costs 6 m n, as any that is trained.
        """
        frozen = added = 0
        for weight in self.weights(model):
            if weight.trainable:
                added += weight.count
            elif weight.layer is not None and len(weight.shape) > 1:
                frozen += weight.count
        frozen += model.vocabulary * model.width  # the head, tied or not
        return model.flops(sequence) - 2.0 * frozen + 6.0 * added

    def _is_target(self, weight: Weight, model: Model) -> bool:
        inside = weight.name.removeprefix(f"blocks.{weight.layer}.").rpartition(".")[0]
        return weight.layer is not None and inside in self.adapted(model)

    def tensor_split(self, model: Model) -> dict[str, Split]:
        """Returns the model's table, and A and B cut on the side on which their layer is."""
        table = model.tensor_split()
        added = {}
        for name, how in table.items():
            if name.removeprefix("blocks.*.") in self.adapted(model):
                cut = how is Split.column
                added[f"{name}.lora_A.default"] = Split.whole if cut else Split.row
                added[f"{name}.lora_B.default"] = Split.column if cut else Split.tokens
        return table | added

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range."""
        if self.rank < 1:
            yield Complaint("adapter.rank", self.rank, "must be 1 or more", "set adapter.rank=8")
        if not self.alpha > 0:
            yield Complaint("adapter.alpha", self.alpha, "must be positive", "set adapter.alpha=16")
        if not 0 <= self.dropout < 1:
            yield Complaint("adapter.dropout", self.dropout, "is not in [0, 1)")
        if not self.targets:
            yield Complaint("adapter.targets", [], "names no layer", "set adapter.targets=[auto]")

    def complaints_with(self, model: Model) -> Iterator[Complaint]:
        """Yields targets that are no linear layers of the model's blocks."""
        table = model.tensor_split()
        linear = [
            name.removeprefix("blocks.*.")
            for name, how in table.items()
            if name.startswith("blocks.*.") and how in (Split.column, Split.row)
        ]
        for name in self.adapted(model):
            if name not in linear:
                reason = "is no linear layer of the model's blocks"
                yield Complaint("adapter.targets", name, reason, meant(name, linear))

    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts PEFT's layers in the place of the targets, and freezes everything else."""
        from scalewise.adapters.lora import inject

        inject(module, self.adapted(model), self)

    def fill(self, module: ModelModule, seed: int) -> None:
        """Draws A as PEFT does, each from ``seed`` and its name; B is zero."""
        from scalewise.adapters.lora import draw

        draw(module, seed)
