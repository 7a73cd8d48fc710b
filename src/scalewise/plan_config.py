"""Config group ``plan``: memory method, search and policy for runs that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


class PlanSearch(StrEnum):
    """What a search varies. Values typed on the command line stay fixed."""

    none = "none"
    """No search: the run is planned as it is."""
    layout = "layout"
    """Mesh sizes, micro-batch size and activation checkpointing; the training result stays the
    same."""
    memory = "memory"
    """Micro-batch size, activation checkpointing, loss chunks, precision, optimizer and adapter."""
    all = "all"
    """Everything that ``layout`` and ``memory`` vary; then, for the best runs, pipeline schedule,
    sharded state, offload, checkpointing of every second block, loss chunks, compilation, DeepSpeed
    and further optimizers."""
    micro_batch = "micro_batch"
    """The largest micro-batch that fits."""
    sequence = "sequence"
    """The longest sequence that fits, up to the context of the model."""
    devices = "devices"
    """The fewest devices on which a layout fits; the training result stays the same."""
    hardware = "hardware"
    """The GPU profiles on which the run fits, by price."""

    @property
    def is_limit(self) -> bool:
        """Whether the search varies one quantity to find its limit."""
        return self in (
            PlanSearch.micro_batch,
            PlanSearch.sequence,
            PlanSearch.devices,
            PlanSearch.hardware,
        )


class RankBy(StrEnum):
    """Quantity that a search minimizes."""

    time = "time"
    """Time of one optimizer step per token."""
    price = "price"
    """Price per token."""
    memory = "memory"
    """Peak memory."""


class MemoryMethod(StrEnum):
    """How peak memory is predicted."""

    ledger = "ledger"
    """Analytic memory model, computed from the configs; imports no torch."""
    trace = "trace"
    """One step of the real module with FakeTensor; imports torch and takes seconds."""


class UnfitPolicy(StrEnum):
    """What ``train`` does with a run that does not fit its hardware."""

    none = "none"
    """Start the run as it is."""
    auto = "auto"
    """Change the run as ``plan`` suggests: by ``plan.search`` if set, else by the smallest change
    that fits."""


@register_option("plan", "planning")
@dataclass(frozen=True)
class PlanConfig:
    """Planning of a run: memory, time and search."""

    method: MemoryMethod = MemoryMethod.ledger
    """Method that predicts peak memory."""
    full_depth: bool = False
    """Whether a trace runs every layer instead of extrapolating from shallow copies."""
    search: PlanSearch = PlanSearch.none
    """What the planner varies to find a better run."""
    rank_by: RankBy = RankBy.time
    """Quantity that the search minimizes."""
    fit: UnfitPolicy = UnfitPolicy.none
    """What ``train`` does with a run that does not fit."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for ``train`` with a search that chooses no run."""
        if self.search.is_limit and self.fit is UnfitPolicy.auto:
            reason = f"chooses no run with plan.search={self.search}"
            yield ConfigIssue("plan.fit", self.fit.value, reason, "set plan.search=layout")
