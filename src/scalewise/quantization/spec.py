"""What every quantization answers: which matrices it packs, and the bytes that it holds of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.adapters.spec import Adapter
from scalewise.adapters.spec import census as unpacked_census
from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.models.base import Model, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.module import ModelModule
    from scalewise.run import Run


class Quantization(ABC):
    """How the frozen matrices of a model are held, as a spec."""

    scale_bytes: float = 0.0
    """Bytes of a number of the matrix that its scales take while they are unpacked."""

    @abstractmethod
    def packed(self, model: Model) -> tuple[str, ...]:
        """Returns the linear layers whose matrices are packed, by name within a block."""

    @abstractmethod
    def parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns what is held of a matrix that is packed."""

    def stored(self, weight: Weight, model: Model) -> tuple[Weight, ...]:
        """Returns what is held of any weight of an adapted model."""
        return self.parts(weight) if self.is_packed(weight, model) else (weight,)

    def is_packed(self, weight: Weight, model: Model) -> bool:
        """Returns whether a weight of the model is one of the packed matrices."""
        module, _, kind = weight.name.rpartition(".")
        inside = module.removeprefix(f"blocks.{weight.layer}.")
        return weight.layer is not None and kind == "weight" and inside in self.packed(model)

    def complaints(self) -> Iterator[Complaint]:
        """Yields figures out of range."""
        yield from ()

    def complaints_with(self, run: Run) -> Iterator[Complaint]:
        """Yields what packed matrices do not go with."""
        yield from ()

    def machine_complaints(self) -> Iterator[Complaint]:
        """Yields packages that are not installed."""
        yield from ()

    @abstractmethod
    def apply(self, module: ModelModule, model: Model) -> None:
        """Puts layers that hold packed matrices in the place of others, on the meta device."""

    @abstractmethod
    def unpacked(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint with every matrix whole, in fp32 where packed."""

    @abstractmethod
    def rounded(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns a model's tensors as packing leaves them, in fp32 where packed."""


@option("quantization", "none")
@dataclass(frozen=True)
class NoQuantization(Quantization):
    """Frozen weights are held in the format of all others."""

    def packed(self, model: Model) -> tuple[str, ...]:
        """Returns none."""
        return ()

    def parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns the weight as it is."""
        return (weight,)

    def apply(self, module: ModelModule, model: Model) -> None:
        """Changes nothing."""

    def unpacked(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns them as they are."""
        return dict(state)

    def rounded(self, state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
        """Returns them as they are."""
        return dict(state)


@lru_cache(maxsize=64)
def census(quantization: Quantization, adapter: Adapter, model: Model) -> tuple[Weight, ...]:
    """Returns every tensor that is held of an adapted model; a search asks a thousand times."""
    weights = unpacked_census(adapter, model)
    return tuple(part for weight in weights for part in quantization.stored(weight, model))


@lru_cache(maxsize=64)
def census_by_kind(
    quantization: Quantization, adapter: Adapter, model: Model
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Returns the weights of one block, all blocks being alike, and those outside of blocks."""
    whole = census(quantization, adapter, model)
    block = tuple(weight for weight in whole if weight.layer == 0)
    return block, tuple(weight for weight in whole if weight.layer is None)
