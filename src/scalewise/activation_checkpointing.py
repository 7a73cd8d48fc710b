"""What a block keeps of its forward pass for the backward one, and what it computes again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.planner.config import PlanSearch
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from scalewise.models.base import StageSlice
    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

OFFLOAD_MIN_BYTES = 1024
"""Bytes of the smallest tensor that is offloaded: less is not worth the way."""


class Recompute(StrEnum):
    """What backward computes a second time."""

    nothing = "nothing"
    selective = "selective"
    """All but matrix products and attention, whose results are kept (Korthikanti et al., 2022)."""
    full = "full"
    """The whole block: its input alone is kept (Chen et al., 2016)."""


class ActivationCheckpointing(ABC):
    """Activation checkpointing, block by block; ``offload``: whether what is kept goes away."""

    offload: bool = False

    @abstractmethod
    def of(self, layer: int) -> Recompute:
        """Returns what backward computes a second time of a layer of the whole model."""

    @abstractmethod
    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields what cannot be."""

    @abstractmethod
    def complaints_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what does not go with the rest of a run."""

    def of_model(self, layers: int) -> Counter[Recompute]:
        """Returns the layers of a whole model by what backward computes a second time."""
        return Counter(map(self.of, range(layers)))

    def described(self, layers: int) -> str:
        """Returns it in words: ``full``, ``8 full, 24 selective``, ``full, offloaded``."""
        found = self.of_model(layers)
        told = ", ".join(f"{count} {recompute}" for recompute, count in found.items())
        if len(found) == 1:
            told = min(found).value
        return f"{told}, offloaded" if self.offload else told

    def of_parts(self, parts: tuple[StageSlice, ...]) -> tuple[Recompute, ...]:
        """Returns the same of each layer of some parts, in order."""
        return tuple(self.of(layer) for part in parts for layer in part.layers)

    def apply(self, module: ModelModule, part: StageSlice) -> None:
        """Makes the blocks of ``part`` forget, in place; names and weights stay as they are."""
        from scalewise.strategies.activation_checkpointing import checkpoint_block
        from scalewise.strategies.activation_offload import offload_block

        for recompute, block in zip(self.of_parts((part,)), module.layers(), strict=True):
            if recompute is not Recompute.nothing:
                checkpoint_block(block, keep_products=recompute is Recompute.selective)
            if self.offload:
                offload_block(block)


@register_option("memory", "memory")
@dataclass(frozen=True)
class FixedCheckpointing(ActivationCheckpointing):
    """The same of every block, or of one in so many."""

    recompute: Recompute = Recompute.nothing
    """What backward computes a second time, of one block in ``every``."""
    every: float = 1.0
    """2: every second block, from the first; 1.5: two of three; 1: all."""
    otherwise: Recompute = Recompute.nothing
    """What backward computes a second time of the other blocks."""
    offload: bool = False
    """Whether what blocks keep waits for backward on the host; from the CPU, on the disk."""

    def of(self, layer: int) -> Recompute:
        """Returns what backward computes a second time of a layer of the whole model."""
        return self.recompute if layer % self.every < 1 else self.otherwise

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields a number of blocks that there cannot be."""
        if not self.every >= 1:
            reason = "is one block in so many; 1 means every block"
            yield ConfigIssue("memory.every", self.every, reason, "set memory.every=2")

    def complaints_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields compiled blocks, which keep what is known to their compiler alone."""
        if self.offload and run.compile.scope is not CompileScope.none:
            reason = "does not reach into compiled blocks"
            yield ConfigIssue("memory.offload", True, reason, "set compile=none")


@register_option("memory", "auto")
@dataclass(frozen=True)
class AutoCheckpointing(ActivationCheckpointing):
    """As little recomputation as a budget allows, by the ledger, chosen before the run starts.

    Until it is chosen, nothing is computed a second time.
    """

    budget_gib: float | None = None
    """Memory that the fullest rank may allocate, GiB; None: what its device has."""

    def of(self, layer: int) -> Recompute:
        """Returns that nothing is computed a second time: nothing is chosen yet."""
        return Recompute.nothing

    def apply(self, module: ModelModule, part: StageSlice) -> None:
        """Raises ``RuntimeError``: what nobody has chosen would be left out in silence."""
        raise RuntimeError("memory=auto is chosen before a module is built (plan.budget.settled)")

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields a budget that is none."""
        if self.budget_gib is not None and not self.budget_gib > 0:
            yield ConfigIssue("memory.budget_gib", self.budget_gib, "must be positive")

    def complaints_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields a search, which chooses by itself."""
        if run.plan.search is not PlanSearch.none:
            reason, cure = "is chosen by plan.search itself", "leave it out"
            yield ConfigIssue("memory", "auto", reason, cure)
