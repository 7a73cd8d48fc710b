"""What ``scalewise plan`` looks for, and whether ``train`` follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue


class PlanSearch(StrEnum):
    """What a search varies. What was typed on the command line is held."""

    none = "none"
    layout = "layout"
    """Sizes of the mesh, micro batch and recomputation: what leaves training as it is."""
    memory = "memory"
    """Micro batch, recomputation, pieces of the loss, precision, optimizer and adapter."""
    all = "all"


class RankBy(StrEnum):
    """What a search wants least of."""

    time = "time"
    price = "price"
    memory = "memory"


class MemoryMethod(StrEnum):
    """How memory is foreseen."""

    ledger = "ledger"
    """From the specs alone, in no time."""
    trace = "trace"
    """By a step of the real module on tensors without memory; imports torch, takes seconds."""


class UnfitPolicy(StrEnum):
    """What becomes of a run that does not fit its hardware."""

    none = "none"
    """It starts all the same."""
    auto = "auto"
    """``train`` changes it as ``plan`` would: by its search, or as little as makes it fit."""


@register_option("plan", "planning")
@dataclass(frozen=True)
class PlanConfig:
    """How a run is planned."""

    method: MemoryMethod = MemoryMethod.ledger
    """How memory is foreseen."""
    full_depth: bool = False
    """Whether a trace runs every layer, and no shallow copies to go on from."""
    search: PlanSearch = PlanSearch.none
    """What is varied to find a better run."""
    rank_by: RankBy = RankBy.time
    """What the best run of a search has least of."""
    fit: UnfitPolicy = UnfitPolicy.none
    """What ``train`` does with a run that does not fit."""

    def complaints(self) -> Iterator[ConfigIssue]:
        """Yields nothing: every option can be had."""
        yield from ()
