"""``memory=auto``: the cheapest activation checkpointing that fits a memory budget.

The blocks of a model are alike, so the number of checkpointed blocks determines memory and time.
The search tries every number, which makes it exact up to the choice of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.activation_checkpointing import AutoCheckpointing, FixedCheckpointing
from scalewise.errors import ConfigError
from scalewise.models.op_graph import Recompute
from scalewise.planner import step_time
from scalewise.planner.run_option import RunOption
from scalewise.units import GIB, GIGA, TERA, format_bytes

RECOMPUTE_PAIRS = (
    (Recompute.selective, Recompute.nothing),
    (Recompute.full, Recompute.selective),
    (Recompute.full, Recompute.nothing),
)
"""Recomputation of some blocks, and of all others; a third kind would save no time."""
DIGITS = 4
DEFAULT_RATES = step_time.DeviceRates(100 * TERA, 200 * TERA, 50 * TERA, 1000 * GIGA, 0.0)
"""Rates of a typical accelerator, to compare recomputation where the profile has no rates."""


def resolve_auto_checkpointing(option: RunOption) -> RunOption:
    """Option with ``memory=auto`` replaced by the chosen activation checkpointing.

    Raises:
        ConfigError: Full recomputation of all blocks exceeds ``memory.budget_gib``.
    """
    if not isinstance(option.run.memory, AutoCheckpointing):
        return option
    budget = option.run.memory.budget_gib
    if candidates := list(_candidates_within_budget(option, budget)):
        return min(candidates, key=_recompute_seconds)
    full_recompute = option.set_checkpointing(FixedCheckpointing(Recompute.full))
    peak = full_recompute.fit.breakdown.peak
    if budget is None or peak <= budget * GIB:
        return full_recompute  # the fit status reports the missing memory
    reason = f"is less than the {format_bytes(peak)} that remain with full recomputation"
    fix = f"set memory.budget_gib={_round_up_gib(peak)}, or a smaller trainer.micro_batch"
    raise ConfigError.for_key("memory.budget_gib", budget, reason, fix)


def _recompute_seconds(option: RunOption) -> float:
    rates = step_time.device_rates(option.run) or DEFAULT_RATES
    return step_time.recompute_seconds(option.run, rates)


def _candidates_within_budget(option: RunOption, budget: float | None) -> Iterator[RunOption]:
    """Yield the run without recomputation if it fits, else the least recomputation of each pair."""
    without_recompute = option.set_checkpointing(FixedCheckpointing())
    if _is_within_budget(without_recompute, budget):
        yield without_recompute
        return
    for recompute, otherwise in RECOMPUTE_PAIRS:
        candidates = (
            _with_checkpointing(option, recompute, otherwise, count)
            for count in range(1, option.run.model.layers + 1)
        )
        cheapest = next((it for it in candidates if _is_within_budget(it, budget)), None)
        if cheapest is not None and cheapest.is_valid:
            yield cheapest


def _with_checkpointing(
    option: RunOption, recompute: Recompute, other_recompute: Recompute, count: int
) -> RunOption:
    layers = option.run.model.layers
    if count == layers:
        return option.set_checkpointing(FixedCheckpointing(recompute))
    every = round(layers / count, DIGITS)
    return option.set_checkpointing(FixedCheckpointing(recompute, every, other_recompute))


def _is_within_budget(option: RunOption, budget: float | None) -> bool:
    """Whether a run fits the budget and its device; a budget may exceed the device memory."""
    if budget is None:
        return option.fit.status.is_acceptable
    return option.fit.breakdown.peak <= budget * GIB and not option.fit.status.is_out_of_memory


def _round_up_gib(size: int) -> str:
    """Round a size up to three digits of GiB."""
    gib = size / GIB
    digits = f"{gib:.3g}"
    return digits if float(digits) >= gib else f"{gib * 1.01:.3g}"
