"""Low-rank products beside frozen matrices, as specs: LoRA and what became of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

from scalewise.adapters.spec import Adapter
from scalewise.config.near import meant
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

if TYPE_CHECKING:
    from scalewise.models.module import ModelModule

AUTO = "auto"


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
    """Patterns (regex) of linear layers' names within a block: ``attention[.]query``, ``.*[.]up``;
    auto: the model's own choice."""

    rank_stabilized = False
    """Whether alpha is divided by the root of the rank, and not by the rank."""

    @property
    def scale(self) -> float:
        """Returns what the product of B and A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapted(self, model: Model) -> tuple[str, ...]:
        """Returns the linear layers whose whole name a target describes."""
        return _described(self.targets, model)

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
            if kind == "weight" and self.is_target(weight, model):
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

    def is_target(self, weight: Weight, model: Model) -> bool:
        """Returns whether a weight of the model is one that A and B are put beside."""
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
        for target in self.targets:
            try:
                re.compile(target)
            except re.error as error:
                yield Complaint("adapter.targets", target, f"is no pattern: {error}")

    def complaints_with(self, model: Model) -> Iterator[Complaint]:
        """Yields targets that describe no linear layer of the model's blocks."""
        linear = linear_layers(model)
        for target in self.targets:
            if target != AUTO and not _described((target,), model):
                reason = "is no linear layer of the model's blocks"
                yield Complaint("adapter.targets", target, reason, meant(target, linear))

    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts PEFT's layers in the place of the targets, and freezes everything else."""
        from scalewise.adapters.lora import inject

        inject(module, self.adapted(model), self)

    def fill(self, module: ModelModule, seed: int) -> None:
        """Draws A as PEFT does, each from ``seed`` and its name; B is zero."""
        from scalewise.adapters.lora import draw

        draw(module, seed)


@option("adapter", "rslora")
@dataclass(frozen=True)
class RankStabilizedLora(Lora):
    """LoRA with ``alpha / sqrt(rank)``, which a high rank does not starve (Kalajdzievski, 2023)."""

    rank_stabilized = True


@option("adapter", "pissa")
@dataclass(frozen=True)
class Pissa(Lora):
    """LoRA that begins at a matrix's largest singular values (PiSSA; Meng et al., 2024).

    What is frozen is the rest of the matrix: the model computes at first what it did before.
    """

    reads_matrices = True

    def fill(self, module: ModelModule, seed: int) -> None:
        """Moves the principal part of each adapted matrix into A and B."""
        from scalewise.adapters.lora import move_principal

        move_principal(module)


def linear_layers(model: Model) -> tuple[str, ...]:
    """Returns the linear layers of a block, by name within it."""
    return tuple(
        name.removeprefix("blocks.*.")
        for name, how in model.tensor_split().items()
        if name.startswith("blocks.*.") and how in (Split.column, Split.row)
    )


@lru_cache(maxsize=64)
def _described(targets: tuple[str, ...], model: Model) -> tuple[str, ...]:
    """Returns the linear layers that targets describe; a search asks a thousand times."""
    named = set(model.adapter_targets) if AUTO in targets else set()
    patterns = [re.compile(target) for target in targets if target != AUTO]
    return tuple(
        name
        for name in linear_layers(model)
        if name in named or any(pattern.fullmatch(name) for pattern in patterns)
    )
