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
    """What the backward pass of a block recomputes."""

    nothing = "nothing"
    """Nothing: all activations are stored."""
    selective = "selective"
    """All but the results of matmuls and attention, which are stored (Korthikanti et al., 2022)."""
    full = "full"
    """The whole block: only its input is stored (Chen et al., 2016)."""


class ActivationCheckpointing(ABC):
    """Activation checkpointing, block by block; ``offload``: whether what is kept goes away."""

    offload: bool = False

    @abstractmethod
    def recompute_for_layer(self, layer: int) -> Recompute:
        """Returns what backward computes a second time of a layer of the whole model."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what cannot be."""

    @abstractmethod
    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what does not go with the rest of a run."""

    def count_by_recompute(self, layers: int) -> Counter[Recompute]:
        """Returns the layers of a whole model by what backward computes a second time."""
        return Counter(map(self.recompute_for_layer, range(layers)))

    def describe(self, layers: int) -> str:
        """Returns it in words: ``full``, ``8 full, 24 selective``, ``full, offloaded``."""
        found = self.count_by_recompute(layers)
        told = ", ".join(f"{count} {recompute}" for recompute, count in found.items())
        if len(found) == 1:
            told = min(found).value
        return f"{told}, offloaded" if self.offload else told

    def recompute_per_layer(self, stage_slices: tuple[StageSlice, ...]) -> tuple[Recompute, ...]:
        """Returns the same of each layer of some parts, in order."""
        return tuple(
            self.recompute_for_layer(layer) for part in stage_slices for layer in part.layers
        )

    def apply(self, module: ModelModule, stage: StageSlice) -> None:
        """Makes the blocks of ``stage`` forget, in place; names and weights stay as they are."""
        from scalewise.strategies.activation_checkpointing import checkpoint_block
        from scalewise.strategies.activation_offload import offload_block

        for recompute, block in zip(
            self.recompute_per_layer((stage,)), module.layers(), strict=True
        ):
            if recompute is not Recompute.nothing:
                checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
            if self.offload:
                offload_block(block)


@register_option("memory", "memory")
@dataclass(frozen=True)
class FixedCheckpointing(ActivationCheckpointing):
    """Activation checkpointing of every block, or of every n-th block."""

    recompute: Recompute = Recompute.nothing
    """What the backward pass recomputes in a checkpointed block."""
    every: float = 1.0
    """Distance between checkpointed blocks, in blocks; 1: every block, 2: every second block, 1.5:
    two blocks of three."""
    otherwise: Recompute = Recompute.nothing
    """What the backward pass recomputes in the other blocks."""
    offload: bool = False
    """Whether stored activations are moved to host memory until the backward pass; on the CPU, to
    disk."""

    def recompute_for_layer(self, layer: int) -> Recompute:
        """Returns what backward computes a second time of a layer of the whole model."""
        return self.recompute if layer % self.every < 1 else self.otherwise

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a number of blocks that there cannot be."""
        if not self.every >= 1:
            reason = "is one block in so many; 1 means every block"
            yield ConfigIssue("memory.every", self.every, reason, "set memory.every=2")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields compiled blocks, which keep what is known to their compiler alone."""
        if self.offload and run.compile.scope is not CompileScope.none:
            reason = "does not reach into compiled blocks"
            yield ConfigIssue("memory.offload", True, reason, "set compile=none")


@register_option("memory", "auto")
@dataclass(frozen=True)
class AutoCheckpointing(ActivationCheckpointing):
    """Least recomputation that fits a memory budget, chosen by the planner before the start."""

    budget_gib: float | None = None
    """Memory that the fullest rank may allocate, in GiB; null: all memory of its device."""

    def recompute_for_layer(self, layer: int) -> Recompute:
        """Returns that nothing is computed a second time: nothing is chosen yet."""
        return Recompute.nothing

    def apply(self, module: ModelModule, stage: StageSlice) -> None:
        """Raises ``RuntimeError``: what nobody has chosen would be left out in silence."""
        raise RuntimeError("memory=auto is chosen before a module is built (plan.budget.settled)")

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields a budget that is none."""
        if self.budget_gib is not None and not self.budget_gib > 0:
            yield ConfigIssue("memory.budget_gib", self.budget_gib, "must be positive")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields a search, which chooses by itself."""
        if run.plan.search is not PlanSearch.none:
            reason, fix = "is chosen by plan.search itself", "leave it out"
            yield ConfigIssue("memory", "auto", reason, fix)
