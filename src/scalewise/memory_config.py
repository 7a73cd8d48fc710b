"""Configs of activation checkpointing and activation offload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.models.base import StageSlice
from scalewise.models.op_graph import Recompute
from scalewise.registry import register_option

OFFLOAD_MIN_BYTES = 1024
"""Smallest storage that is offloaded, in bytes: a transfer of less costs more than it saves."""


class ActivationCheckpointing(ABC):
    """Base class of activation checkpointing configs, with a mode per layer."""

    offload: bool = False
    """Whether stored activations are offloaded until the backward pass."""

    @property
    def supports_compile(self) -> bool:
        """Whether blocks can be compiled: their saved tensors cannot be offloaded."""
        return not self.offload

    @abstractmethod
    def recompute_for_layer(self, layer: int) -> Recompute:
        """Recompute mode of a layer; ``layer``: index in the full model."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues with values of the options."""

    def count_by_recompute(self, layers: int) -> Counter[Recompute]:
        """Number of layers of the full model by recompute mode."""
        return Counter(map(self.recompute_for_layer, range(layers)))

    def describe(self, layers: int) -> str:
        """Short text for tables: ``full``, ``8 full, 24 selective``, ``full, offloaded``."""
        counts = self.count_by_recompute(layers)
        text = ", ".join(f"{count} {recompute}" for recompute, count in counts.items())
        if len(counts) == 1:
            text = min(counts).value
        return f"{text}, offloaded" if self.offload else text

    def recompute_per_layer(self, stage_slices: tuple[StageSlice, ...]) -> tuple[Recompute, ...]:
        """Recompute mode of each layer of some pipeline stages, in order."""
        return tuple(
            self.recompute_for_layer(layer) for stage in stage_slices for layer in stage.layers
        )


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
        """Recompute mode of a layer; ``layer``: index in the full model."""
        return self.recompute if layer % self.every < 1 else self.otherwise

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if ``every`` is less than 1."""
        if not self.every >= 1:
            reason = "must be 1 or more; 1 is every block"
            yield ConfigIssue("memory.every", self.every, reason, "set memory.every=2")


@register_option("memory", "auto")
@dataclass(frozen=True)
class AutoCheckpointing(ActivationCheckpointing):
    """Least recomputation that fits a memory budget, chosen by the planner before the start."""

    budget_gib: float | None = None
    """Memory that the fullest rank may allocate, in GiB; null: all memory of its device."""

    def recompute_for_layer(self, layer: int) -> Recompute:
        """``Recompute.nothing``, until the planner has chosen."""
        return Recompute.nothing

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if the budget is not positive."""
        if self.budget_gib is not None and not self.budget_gib > 0:
            yield ConfigIssue("memory.budget_gib", self.budget_gib, "must be positive")
