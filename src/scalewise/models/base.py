"""What every model answers: its weights, its flops, and the real module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from scalewise.errors import Complaint

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Weight:
    """One parameter tensor of a model.

    ``name`` is its name in the module's ``state_dict``; ``role`` one of ``embedding``,
    ``position``, ``attention``, ``feedforward``, ``norm``, ``bias``, ``head``; ``layer`` the
    block it belongs to, None outside the blocks. A tied weight is listed once.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None

    @property
    def count(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)


class Model(ABC):
    """A model as a spec: pure questions first, ``build`` for the living module."""

    vocabulary: int
    context: int

    @abstractmethod
    def census(self) -> tuple[Weight, ...]:
        """Returns every trainable tensor once, in the order of the module's parameters."""

    @abstractmethod
    def flops(self, sequence: int) -> float:
        """Returns the flops of one forward and backward pass, per token of a sequence.

        A multiply and an add are two flops. ``sequence`` is the tokens of one row.
        """

    @abstractmethod
    def complaints(self) -> Iterator[Complaint]:
        """Yields what is contradictory inside this spec."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Returns the module: ``tokens_BT -> logits_BTV`` (B rows, T tokens, V vocabulary)."""

    @property
    def parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(weight.count for weight in self.census())
