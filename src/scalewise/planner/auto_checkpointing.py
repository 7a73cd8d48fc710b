"""``memory=auto``: the cheapest activation checkpointing that fits a memory budget.

The blocks of a model are alike, so the number of checkpointed blocks determines memory and time.
The search tries every number, which makes it exact up to the choice of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing, FixedCheckpointing
from scalewise.errors import ConfigError
from scalewise.models.op_graph import Recompute
from scalewise.planner import step_time, worst_rank
from scalewise.planner.fit_check import check_fit
from scalewise.units import GIB, GIGA, TERA, format_bytes
from scalewise.validation.run_issues import iter_issues

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

RECOMPUTE_PAIRS = (
    (Recompute.selective, Recompute.nothing),
    (Recompute.full, Recompute.selective),
    (Recompute.full, Recompute.nothing),
)
"""Recomputation of some blocks, and of all others; a third kind would save no time."""
DIGITS = 4
DEFAULT_RATES = step_time.DeviceRates(100 * TERA, 200 * TERA, 50 * TERA, 1000 * GIGA, 0.0)
"""Rates of a typical accelerator, to compare recomputation where the profile has no rates."""


def resolve_auto_checkpointing(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run with ``memory=auto`` resolved, and the overrides that select it.

    Raises:
        ConfigError: Full recomputation of all blocks exceeds ``memory.budget_gib``.
    """
    if not isinstance(run.memory, AutoCheckpointing):
        return run, ()
    budget = run.memory.budget_gib
    if candidates := list(_candidates_within_budget(run, budget)):
        best = min(
            candidates,
            key=lambda it: step_time.recompute_seconds(
                it, step_time.device_rates(it) or DEFAULT_RATES
            ),
        )
        return best, _overrides(best.memory)
    full_recompute = replace(run, memory=FixedCheckpointing(Recompute.full))
    peak = worst_rank.worst_rank_breakdown(full_recompute).peak
    if budget is None or peak <= budget * GIB:
        return full_recompute, _overrides(
            full_recompute.memory
        )  # the fit status reports the missing memory
    reason = f"is less than the {format_bytes(peak)} that remain with full recomputation"
    fix = f"set memory.budget_gib={_round_up_gib(peak)}, or a smaller trainer.micro_batch"
    raise ConfigError.for_key("memory.budget_gib", budget, reason, fix)


def _candidates_within_budget(run: RunConfig, budget: float | None) -> Iterator[RunConfig]:
    """Yield the run without recomputation if it fits, else the least recomputation of each pair."""
    without_recompute = replace(run, memory=FixedCheckpointing())
    if _is_within_budget(without_recompute, budget):
        yield without_recompute
        return
    for recompute, otherwise in RECOMPUTE_PAIRS:
        candidates = (
            _with_checkpointing(run, recompute, otherwise, count)
            for count in range(1, run.model.layers + 1)
        )
        cheapest = next((it for it in candidates if _is_within_budget(it, budget)), None)
        if cheapest is not None and not any(iter_issues(cheapest)):
            yield cheapest


def _with_checkpointing(
    run: RunConfig, recompute: Recompute, other_recompute: Recompute, count: int
) -> RunConfig:
    if count == run.model.layers:
        return replace(run, memory=FixedCheckpointing(recompute))
    every = round(run.model.layers / count, DIGITS)
    return replace(run, memory=FixedCheckpointing(recompute, every, other_recompute))


def _is_within_budget(run: RunConfig, budget: float | None) -> bool:
    """Whether a run fits the budget and its device; a budget may exceed the device memory."""
    fit = check_fit(run)
    if budget is None:
        return fit.status.is_acceptable
    return fit.breakdown.peak <= budget * GIB and not fit.status.is_out_of_memory


def _overrides(checkpointing: object) -> tuple[str, ...]:
    assert isinstance(checkpointing, FixedCheckpointing)
    if checkpointing.recompute is Recompute.nothing:
        return ("memory=none",)
    overrides = [f"memory=checkpoint_{checkpointing.recompute}"]
    if checkpointing.every > 1 and checkpointing.recompute is Recompute.full:
        overrides = ["memory=checkpoint_every_n"]
    if checkpointing.every > 1:
        overrides.append(f"memory.every={checkpointing.every:g}")
    if checkpointing.otherwise is not Recompute.nothing:
        overrides.append(f"memory.otherwise={checkpointing.otherwise}")
    return tuple(overrides)


def _round_up_gib(size: int) -> str:
    """Round a size up to three digits of GiB."""
    gib = size / GIB
    digits = f"{gib:.3g}"
    return digits if float(digits) >= gib else f"{gib * 1.01:.3g}"
