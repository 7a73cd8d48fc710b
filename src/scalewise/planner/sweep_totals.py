"""What all jobs of a sweep will take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalewise.planner.plan import Plan


@dataclass(frozen=True)
class SweepTotals:
    """The sums over the jobs of a sweep that may fit."""

    jobs: int
    """All jobs."""
    unfit: int
    """Jobs that are surely out of memory; they take no time."""
    seconds: float
    """Time of the jobs whose time is known, one after the other."""
    dollars: float | None
    """Their price; None where no price is known."""
    untimed: int
    """Jobs that may fit and whose time is not known."""
    unrated: int
    """Of those, jobs whose hardware profile lacks a rate."""


def sum_plans(plans: Sequence[Plan]) -> SweepTotals:
    """Returns the sums over the plans of a sweep."""
    tried = [plan for plan in plans if not plan.fit.status.is_out_of_memory]
    timed = [(plan, tokens) for plan in tried if (tokens := training_tokens(plan)) is not None]
    prices = [price for plan, tokens in timed if (price := plan.dollars_for(tokens)) is not None]
    return SweepTotals(
        len(plans),
        len(plans) - len(tried),
        sum(plan.seconds_for(tokens) or 0.0 for plan, tokens in timed),
        sum(prices) if prices else None,
        len(tried) - len(timed),
        sum(plan.step_time is None and not plan.run.objective.trace_only for plan in tried),
    )


def training_tokens(plan: Plan) -> int | None:
    """Returns the tokens that a run of known speed trains on; None: epochs of unknown length."""
    if plan.step_time is None or plan.run.trainer.max_epochs is not None:
        return None
    return plan.run.tokens_per_step * plan.run.num_steps(samples=0)
