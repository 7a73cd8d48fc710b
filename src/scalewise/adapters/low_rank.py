"""Low-rank products beside frozen matrices, as specs: LoRA and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import TYPE_CHECKING

from scalewise.adapters import layers
from scalewise.adapters.spec import Adapter
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.module import ModelModule


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
    targets: tuple[str, ...] = (layers.AUTO,)
    """Patterns (regex) of linear layers' names within a block: ``attention[.]query``, ``.*[.]up``;
    auto: the model's own choice."""
    trained: tuple[str, ...] = ()
    """Patterns of modules that are trained whole beside it: ``.*norm``, ``embedding``, ``head``."""
    resume: str | None = None
    """An adapter to begin with: a run's folder, a checkpoint, or a folder of PEFT's; None: anew."""

    rank_stabilized = False
    """Whether alpha is divided by the root of the rank, and not by the rank."""
    turns_off = True
    imports = ("peft",)

    @property
    def scale(self) -> float:
        """Returns what the product of B and A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapted(self, model: Model) -> tuple[str, ...]:
        """Returns the linear layers whose whole name a target describes."""
        return layers.described(self.targets, model, model.adapter_targets)

    def added(self, weight: Weight, how: Split) -> tuple[Weight, ...]:
        """Returns the A and B of a layer, of which ``weight`` is the matrix."""
        module, (out, into) = weight.name.removesuffix(".weight"), weight.shape
        return tuple(
            replace(weight, name=f"{module}.lora_{part}.default.weight", shape=shape)
            for part, shape in (("A", (self.rank, into)), ("B", (out, self.rank)))
        )

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
        yield from layers.complaints(self.targets, self.trained)

    def complaints_with(self, model: Model) -> Iterator[Complaint]:
        """Yields targets that describe no linear layer of the model's blocks."""
        given = (self.targets, self.trained, self.adapted(model))
        yield from layers.complaints_with(*given, model)

    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts PEFT's layers in the place of the targets, and freezes everything else."""
        from scalewise.adapters.lora import inject

        inject(module, self.adapted(model), self)
        layers.train_whole(module, self.whole(model))

    def off(self, module: ModelModule) -> AbstractContextManager[None]:
        """Returns the context in which the products are left out."""
        from scalewise.adapters.lora import off

        return off(module)

    def fill(self, module: ModelModule, seed: int) -> None:
        """Draws A as PEFT does, each from ``seed`` and its name; B is zero."""
        from scalewise.adapters.lora import draw

        draw(module, seed)

    def merged(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns the model's own weights with each product of B and A added to its matrix."""
        from scalewise.adapters.lora import merged

        return merged(state, self, model)


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
    turns_off = False

    def fill(self, module: ModelModule, seed: int) -> None:
        """Moves the principal part of each adapted matrix into A and B."""
        from scalewise.adapters.lora import move_principal

        move_principal(module)

    def beside(
        self, state: Mapping[str, Tensor], begun: Mapping[str, Tensor]
    ) -> tuple[Lora, dict[str, Tensor]]:
        """Returns it as LoRA of twice the rank beside the model's own weights, ``begun``."""
        from scalewise.adapters.lora import beside

        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        twice = kept | {"rank": 2 * self.rank, "alpha": 2 * self.alpha}
        return Lora(**twice), beside(state, begun, self)


@option("adapter", "dora")
@dataclass(frozen=True)
class Dora(Lora):
    """LoRA of a matrix's direction, with a magnitude for each row (DoRA; Liu et al., 2024).

    ``m / |W + scale B A| * (W + scale B A) x``, the norms of rows being taken for constant in
    backward. They cost 2 rank flops for each number of W once a pass, which plans count as time;
    ``flops`` leaves them out, as the more tokens a pass has, the less they are of it.
    """

    magnitudes = True
    reads_matrices = True

    def added(self, weight: Weight, how: Split) -> tuple[Weight, ...]:
        """Returns the A and B of a layer, and its magnitudes."""
        name = f"{weight.name.removesuffix('.weight')}.lora_magnitude_vector.default.weight"
        magnitudes = replace(weight, name=name, shape=weight.shape[:1], role="scale")
        return (*super().added(weight, how), magnitudes)

    def tensor_split(self, model: Model) -> dict[str, Split]:
        """Returns the table of LoRA, and magnitudes cut or whole as their layer's outputs are."""
        table = super().tensor_split(model)
        for name in self.adapted(model):
            cut = table[f"blocks.*.{name}"] is Split.column
            how = Split.column if cut else Split.tokens
            table[f"blocks.*.{name}.lora_magnitude_vector.default"] = how
        return table

    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts PEFT's layers in the place of the targets, and freezes everything else."""
        from scalewise.adapters.dora import measure_rows

        super().apply(module, model)
        measure_rows(module)

    def fill(self, module: ModelModule, seed: int) -> None:
        """Draws A, and makes each magnitude the norm of its row of W; B is zero."""
        from scalewise.adapters.dora import put_norms

        super().fill(module, seed)
        put_norms(module)
