"""Total time and price of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalewise.planner.plan import Plan


@dataclass(frozen=True)
class SweepTotals:
    """Totals over the jobs of a sweep."""

    jobs: int
    """Number of jobs."""
    unfit: int
    """Number of jobs that run out of memory; they count no time."""
    seconds: float
    """Summed time of the timed jobs, in seconds."""
    dollars: float | None
    """Summed price of the timed jobs, in US dollars; None without a price in the profile."""
    untimed: int
    """Number of jobs that may fit and have no predicted time."""
    unrated: int
    """Number of untimed jobs whose hardware profile lacks a rate."""


def sum_plans(plans: Sequence[Plan]) -> SweepTotals:
    """Return the totals over the plans of a sweep."""
    fitting = [plan for plan in plans if not plan.fit.status.is_out_of_memory]
    timed = [(plan, tokens) for plan in fitting if (tokens := training_tokens(plan)) is not None]
    prices = [price for plan, tokens in timed if (price := plan.dollars_for(tokens)) is not None]
    return SweepTotals(
        len(plans),
        len(plans) - len(fitting),
        sum(plan.seconds_for(tokens) or 0.0 for plan, tokens in timed),
        sum(prices) if prices else None,
        len(fitting) - len(timed),
        sum(plan.step_time is None and not plan.run.objective.trace_only for plan in fitting),
    )


def training_tokens(plan: Plan) -> int | None:
    """Return the number of training tokens of a run.

    None without a predicted step time, or with epochs of unknown length.
    """
    if plan.step_time is None or plan.run.trainer.max_epochs is not None:
        return None
    return plan.run.tokens_per_step * plan.run.num_steps(samples=0)
