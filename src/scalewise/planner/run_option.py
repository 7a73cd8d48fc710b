"""Runs that automatic choices try: micro-batch size, checkpointing, layouts and suggested fixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from scalewise.activation_checkpointing import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.planner.fit_check import FitReport, check_fit
from scalewise.run_config import RunConfig
from scalewise.validation.run_issues import iter_issues


@dataclass(frozen=True)
class RunOption:
    """Changed run, and the overrides that turn the requested run into it."""

    run: RunConfig
    """The changed run."""
    overrides: tuple[str, ...] = ()
    """Overrides of all changes."""

    def change(self, *overrides: str, **groups: Any) -> RunOption:
        """Option with more overrides, and with the config groups that they select."""
        return RunOption(replace(self.run, **groups), (*self.overrides, *overrides))

    def set_checkpointing(self, memory: FixedCheckpointing) -> RunOption:
        """Option with this activation checkpointing."""
        return self.change(*checkpointing_overrides(memory), memory=memory)

    @property
    def is_valid(self) -> bool:
        """Whether the run has no config issues."""
        return not any(iter_issues(self.run))

    @cached_property
    def fit(self) -> FitReport:
        """Predicted memory compared with the hardware."""
        return check_fit(self.run)


def checkpointing_overrides(memory: FixedCheckpointing) -> tuple[str, ...]:
    """Overrides that select an activation checkpointing config."""
    if memory.offload:
        return ("memory=offload_activations",)
    if memory.recompute is Recompute.nothing:
        return ("memory=none",)
    overrides = [f"memory=checkpoint_{memory.recompute}"]
    if memory.every > 1 and memory.recompute is Recompute.full:
        overrides = ["memory=checkpoint_every_n"]
    if memory.every > 1:
        overrides.append(f"memory.every={memory.every:g}")
    if memory.otherwise is not Recompute.nothing:
        overrides.append(f"memory.otherwise={memory.otherwise}")
    return tuple(overrides)
