"""What a block keeps of its forward pass for the backward one, and what it computes again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.errors import Complaint

if TYPE_CHECKING:
    from scalewise.models.module import ModelModule


class Recompute(StrEnum):
    """What backward computes a second time."""

    nothing = "nothing"
    selective = "selective"
    """All but matrix products and attention, whose results are kept (Korthikanti et al., 2022)."""
    full = "full"
    """The whole block: its input alone is kept (Chen et al., 2016)."""


@option("memory", "memory")
@dataclass(frozen=True)
class Memory:
    """Activation checkpointing of every block."""

    recompute: Recompute = Recompute.nothing
    """What backward computes a second time."""

    def complaints(self) -> Iterator[Complaint]:
        """Yields nothing: every option can be had."""
        yield from ()

    def apply(self, module: ModelModule) -> None:
        """Makes every block of a module forget, in place; names and weights stay as they are."""
        if self.recompute is Recompute.nothing:
            return
        from scalewise.layouts.recompute import forget

        for block in module.layers():
            forget(block, keep_products=self.recompute is Recompute.selective)
