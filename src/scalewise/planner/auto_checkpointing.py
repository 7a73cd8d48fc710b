"""``memory=auto``: as little as can be computed again for a run to stay within its budget.

The blocks of a model are alike, so which of them forget matters little and how many matters all:
every number of them is looked at, and the optimum is exact but for their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing, FixedCheckpointing, Recompute
from scalewise.errors import ConfigError
from scalewise.planner import step_time, worst_rank
from scalewise.planner.fit_check import check_fit
from scalewise.units import GIB, GIGA, TERA, format_bytes

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

MIXTURES = (
    (Recompute.selective, Recompute.nothing),
    (Recompute.full, Recompute.selective),
    (Recompute.full, Recompute.nothing),
)
"""What some blocks compute again, and what the others: no third kind would save time."""
DIGITS = 4
USUAL = step_time.DeviceRates(100 * TERA, 200 * TERA, 50 * TERA, 1000 * GIGA, 0.0)
"""Proportions of an accelerator, to tell what takes long where a profile says no rates."""


def resolve_auto_checkpointing(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with what ``memory=auto`` stands for, and what is typed to get it.

    Raises ``ConfigError`` where no recomputation reaches ``memory.budget_gib``.
    """
    if not isinstance(run.memory, AutoCheckpointing):
        return run, ()
    budget = run.memory.budget_gib
    if ways := list(_candidates_within_budget(run, budget)):
        best = min(
            ways,
            key=lambda way: step_time.recompute_seconds(way, step_time.device_rates(way) or USUAL),
        )
        return best, _overrides(best.memory)
    least = replace(run, memory=FixedCheckpointing(Recompute.full))
    peak = worst_rank.worst_rank_breakdown(least).peak
    if budget is None or peak <= budget * GIB:
        return least, _overrides(least.memory)  # the device lacks memory, as the verdict will say
    reason = f"is less than the {format_bytes(peak)} that are left when all blocks compute again"
    fix = f"set memory.budget_gib={_round_up_gib(peak)}, or a smaller trainer.micro_batch"
    raise ConfigError.for_key("memory.budget_gib", budget, reason, fix)


def _candidates_within_budget(run: RunConfig, budget: float | None) -> Iterator[RunConfig]:
    """Yields what keeps within the budget: nothing, else of each mixture what recomputes least."""
    nothing = replace(run, memory=FixedCheckpointing())
    if _is_within_budget(nothing, budget):
        yield nothing
        return
    for recompute, otherwise in MIXTURES:
        ways = (
            _with_checkpointing(run, recompute, otherwise, n)
            for n in range(1, run.model.layers + 1)
        )
        least = next((way for way in ways if _is_within_budget(way, budget)), None)
        if least is not None and not any(least.validate()):
            yield least


def _with_checkpointing(
    run: RunConfig, recompute: Recompute, other_recompute: Recompute, count: int
) -> RunConfig:
    if count == run.model.layers:
        return replace(run, memory=FixedCheckpointing(recompute))
    every = round(run.model.layers / count, DIGITS)
    return replace(run, memory=FixedCheckpointing(recompute, every, other_recompute))


def _is_within_budget(run: RunConfig, budget: float | None) -> bool:
    """Returns whether a run fits a budget, and its device, of which a budget may say too much."""
    fit = check_fit(run)
    if budget is None:
        return fit.status.is_acceptable
    return fit.breakdown.peak <= budget * GIB and not fit.status.is_out_of_memory


def _overrides(checkpointing: object) -> tuple[str, ...]:
    assert isinstance(checkpointing, FixedCheckpointing)
    if checkpointing.recompute is Recompute.nothing:
        return ("memory=none",)
    told = [f"memory=checkpoint_{checkpointing.recompute}"]
    if checkpointing.every > 1 and checkpointing.recompute is Recompute.full:
        told = ["memory=checkpoint_every_n"]
    if checkpointing.every > 1:
        told.append(f"memory.every={checkpointing.every:g}")
    if checkpointing.otherwise is not Recompute.nothing:
        told.append(f"memory.otherwise={checkpointing.otherwise}")
    return tuple(told)


def _round_up_gib(size: int) -> str:
    """Returns GiB that are at least ``size``, in three digits."""
    gib = size / GIB
    digits = f"{gib:.3g}"
    return digits if float(digits) >= gib else f"{gib * 1.01:.3g}"
