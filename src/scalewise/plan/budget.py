"""``memory=auto``: as little as can be computed again for a run to stay within its budget.

The blocks of a model are alike, so which of them forget matters little and how many matters all:
every number of them is looked at, and the optimum is exact but for their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.errors import ConfigError
from scalewise.memory import Auto, Checkpointing, Recompute
from scalewise.plan import memory, steptime
from scalewise.plan.verdict import judged
from scalewise.units import GIB, GIGA, TERA, bytes_text

if TYPE_CHECKING:
    from scalewise.run import Run

MIXTURES = (
    (Recompute.selective, Recompute.nothing),
    (Recompute.full, Recompute.selective),
    (Recompute.full, Recompute.nothing),
)
"""What some blocks compute again, and what the others: no third kind would save time."""
DIGITS = 4
USUAL = steptime.Rates(100 * TERA, 200 * TERA, 50 * TERA, 1000 * GIGA, 0.0)
"""Proportions of an accelerator, to tell what takes long where a profile says no rates."""


def settled(run: Run) -> tuple[Run, tuple[str, ...]]:
    """Returns the run with what ``memory=auto`` stands for, and what is typed to get it.

    Raises ``ConfigError`` where no recomputation reaches ``memory.budget_gib``.
    """
    if not isinstance(run.memory, Auto):
        return run, ()
    budget = run.memory.budget_gib
    if ways := list(_ways(run, budget)):
        best = min(ways, key=lambda way: steptime.again(way, steptime.rates(way) or USUAL))
        return best, _told(best.memory)
    least = replace(run, memory=Checkpointing(Recompute.full))
    peak = memory.worst(least).peak
    if budget is None or peak <= budget * GIB:
        return least, _told(least.memory)  # the device lacks memory, as the verdict will say
    reason = f"is less than the {bytes_text(peak)} that are left when all blocks compute again"
    cure = f"set memory.budget_gib={_above(peak)}, or a smaller trainer.micro_batch"
    raise ConfigError.one("memory.budget_gib", budget, reason, cure)


def _ways(run: Run, budget: float | None) -> Iterator[Run]:
    """Yields what keeps within the budget: nothing, else of each mixture what recomputes least."""
    nothing = replace(run, memory=Checkpointing())
    if _within(nothing, budget):
        yield nothing
        return
    for recompute, otherwise in MIXTURES:
        ways = (_of(run, recompute, otherwise, n) for n in range(1, run.model.layers + 1))
        least = next((way for way in ways if _within(way, budget)), None)
        if least is not None and not any(least.complaints()):
            yield least


def _of(run: Run, recompute: Recompute, otherwise: Recompute, count: int) -> Run:
    if count == run.model.layers:
        return replace(run, memory=Checkpointing(recompute))
    every = round(run.model.layers / count, DIGITS)
    return replace(run, memory=Checkpointing(recompute, every, otherwise))


def _within(run: Run, budget: float | None) -> bool:
    """Returns whether a run fits a budget, and its device, of which a budget may say too much."""
    fit = judged(run)
    if budget is None:
        return fit.verdict.good
    return fit.ledger.peak <= budget * GIB and not fit.verdict.bad


def _told(chosen: object) -> tuple[str, ...]:
    assert isinstance(chosen, Checkpointing)
    if chosen.recompute is Recompute.nothing:
        return ("memory=none",)
    told = [f"memory=checkpoint_{chosen.recompute}"]
    if chosen.every > 1 and chosen.recompute is Recompute.full:
        told = ["memory=checkpoint_every_n"]
    if chosen.every > 1:
        told.append(f"memory.every={chosen.every:g}")
    if chosen.otherwise is not Recompute.nothing:
        told.append(f"memory.otherwise={chosen.otherwise}")
    return tuple(told)


def _above(size: int) -> str:
    """Returns GiB that are at least ``size``, in three digits."""
    gib = size / GIB
    digits = f"{gib:.3g}"
    return digits if float(digits) >= gib else f"{gib * 1.01:.3g}"
