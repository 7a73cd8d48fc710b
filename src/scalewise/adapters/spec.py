"""What every adapter answers: which weights it freezes and which it adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Split, Weight

if TYPE_CHECKING:
    from scalewise.models.module import ModelModule


class Adapter(ABC):
    """What is trained of a model, as a spec."""

    rank: int = 0
    dropout: float = 0.0
    reads_matrices = False
    """Whether it is made of the model's own matrices, which then have to be whole."""

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
