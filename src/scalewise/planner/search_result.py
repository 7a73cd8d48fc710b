"""Result of a search: its candidates, the best one, and their Pareto front.

All candidates have a predicted memory. The step time of a candidate is predicted when it is read:
a lower bound shows for most that others are better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.plan_config import RankBy
from scalewise.planner import layout_enumeration
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.plan import Plan
from scalewise.planner.step_parts import StepTime
from scalewise.planner.step_time import device_rates, predict_step_time
from scalewise.run_config import RunConfig

Overrides = tuple[str, ...]
TIME_TOLERANCE = 0.05
"""Relative difference of step times that is too small to prefer a layout with more mesh axes: half
the median error of predicted times (``scalewise bench planner``)."""
Costs = tuple[float, float]
AllCosts = tuple[float, float, float]
"""Step time in seconds, peak memory in bytes, and price in device seconds."""
NOT_PREDICTED = ...  # a value that pickles keep


class LazyStepTime:
    """Descriptor of a step time that is predicted when it is first read."""

    def __get__(self, candidate: SearchCandidate | None, owner: type) -> Any:
        """Return the step time of a candidate."""
        if candidate is None:
            return NOT_PREDICTED
        step_time = candidate.__dict__["step_time"]
        if step_time is NOT_PREDICTED:
            fails = candidate.fit.status is FitStatus.out_of_memory
            step_time = None if fails else predict_step_time(candidate.run)
            candidate.__dict__["step_time"] = step_time
        return step_time

    def __set__(self, candidate: SearchCandidate, step_time: object) -> None:
        """Store a step time, or ``NOT_PREDICTED``."""
        candidate.__dict__["step_time"] = step_time


LAZY_STEP_TIME: Any = LazyStepTime()
"""Default value of ``SearchCandidate.step_time``."""


@dataclass(frozen=True)
class SearchCandidate(Plan):
    """Plan of one run of a search."""

    step_time: StepTime | None = LAZY_STEP_TIME
    """Predicted step time; None if the run is out of memory, or the profile lacks a rate."""
    training_overrides: Overrides = ()
    """Overrides that change the training result or its precision."""
    refinement: Overrides = ()
    """Other overrides that the second stage of a search has added."""
    least_seconds: float = 0.0
    """Lower bound of the step time, in seconds: the step without collectives."""

    @property
    def is_acceptable(self) -> bool:
        """Whether the run fits."""
        return self.fit.status.is_acceptable

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the run trains with DeepSpeed, a package that others do not need."""
        return isinstance(self.run.parallelism, DeepSpeedConfig)

    def cost(self, rank: RankBy) -> tuple[float, float]:
        """Return the ranked quantity, and the one that breaks a tie."""
        return self._cost_of_seconds(rank, self.step_seconds)

    def least_cost(self, rank: RankBy) -> tuple[float, float]:
        """Return lower bounds of both, without predicting the step time."""
        seconds = self.step_seconds if self.has_predicted_time else self.least_seconds
        return self._cost_of_seconds(rank, seconds)

    def _cost_of_seconds(self, rank: RankBy, seconds: float) -> tuple[float, float]:
        peak = float(self.fit.breakdown.peak)
        if rank is RankBy.memory:
            return peak, seconds
        return seconds * (self.run.world_size if rank is RankBy.price else 1), peak

    @property
    def has_predicted_time(self) -> bool:
        """Whether the step time has been predicted."""
        return self.__dict__["step_time"] is not NOT_PREDICTED

    @cached_property
    def step_seconds(self) -> float:
        """Step time, in seconds; 0 if the hardware profile lacks a rate."""
        return 0.0 if self.step_time is None else self.step_time.seconds


@dataclass(frozen=True)
class SearchResult:
    """Candidates of a search."""

    base_run: RunConfig
    """Requested run."""
    candidates: tuple[SearchCandidate, ...]
    """Plans of all valid runs."""

    @cached_property
    def rank_by(self) -> RankBy:
        """Ranked quantity; memory if the hardware profile lacks a rate."""
        return (
            self.base_run.plan.rank_by if device_rates(self.base_run) is not None else RankBy.memory
        )

    @cached_property
    def best(self) -> SearchCandidate | None:
        """The best candidate: by fit, then by changes of training, then by the ranked quantity.

        Of those within ``TIME_TOLERANCE`` of the least time or price, it has the fewest mesh axes,
        and needs no DeepSpeed if another one has as few.
        """
        first, rank = self.lowest_cost, self.rank_by
        if first is None or rank is RankBy.memory:
            return first
        (limit, _), changes = first.cost(rank), len(first.training_overrides)
        return min(
            (
                candidate
                for candidate in self.candidates
                if candidate.is_acceptable == first.is_acceptable
                and not candidate.fit.status.is_out_of_memory
                and len(candidate.training_overrides) == changes
                and candidate.least_cost(rank)[0] <= limit * (1 + TIME_TOLERANCE)
                and candidate.cost(rank)[0] <= limit * (1 + TIME_TOLERANCE)
            ),
            key=lambda it: (_num_axes(it), it.needs_deepspeed, it.cost(rank)),
        )

    @cached_property
    def lowest_cost(self) -> SearchCandidate | None:
        """The best candidate whatever its number of mesh axes; None: none can fit."""
        rank, lowest = self.rank_by, None

        def key(candidate: SearchCandidate, cost: Costs) -> tuple[bool, int, Costs]:
            return not candidate.is_acceptable, len(candidate.training_overrides), cost

        least_keys = [
            (key(candidate, candidate.least_cost(rank)), index, candidate)
            for index, candidate in enumerate(self.candidates)
            if not candidate.fit.status.is_out_of_memory
        ]
        for least_key, index, candidate in sorted(least_keys, key=lambda it: it[:2]):
            if lowest is not None and lowest[0] < least_key:
                break
            found = key(candidate, candidate.cost(rank)), index, candidate
            if lowest is None or found[:2] < lowest[:2]:
                lowest = found
        return None if lowest is None else lowest[2]

    @cached_property
    def pareto_front(self) -> tuple[SearchCandidate, ...]:
        """Pareto front of time, memory and price among runs with unchanged training."""
        return _pareto_front(one for one in self.candidates if not one.training_overrides)

    @cached_property
    def changed_training_front(self) -> tuple[SearchCandidate, ...]:
        """Runs with changed training on the Pareto front of all candidates."""
        return tuple(one for one in _pareto_front(self.candidates) if one.training_overrides)


def _num_axes(candidate: SearchCandidate) -> int:
    return sum(size > 1 for size in layout_enumeration.axis_sizes(candidate.run.parallelism))


def _pareto_front(candidates: Iterable[SearchCandidate]) -> tuple[SearchCandidate, ...]:
    """Return the candidates that fit and that no other dominates, fastest first."""
    front: list[SearchCandidate] = []
    for candidate in sorted(_possible_front(candidates), key=_costs):
        if not any(_dominates(_costs(other), _costs(candidate)) for other in front):
            front.append(candidate)
    return tuple(front)


def _possible_front(candidates: Iterable[SearchCandidate]) -> list[SearchCandidate]:
    """Return the candidates that fit, in order, except those whose lower bounds are dominated.

    Only the step times of these are predicted. One that is faster than a lower bound, with no more
    memory and price, dominates the candidate whatever its step time is.
    """
    acceptable = [one for one in candidates if one.is_acceptable]
    front: list[AllCosts] = []
    possible = []
    for index in sorted(range(len(acceptable)), key=lambda it: _least_costs(acceptable[it])):
        least = _least_costs(acceptable[index])
        if not any(other[0] < least[0] and _dominates(other, least) for other in front):
            possible.append(index)
            costs = _costs(acceptable[index])
            front = [costs, *(other for other in front if not _dominates(costs, other))]
    return [acceptable[index] for index in sorted(possible)]


def _costs(candidate: SearchCandidate) -> AllCosts:
    (seconds, peak), (price, _) = candidate.cost(RankBy.time), candidate.cost(RankBy.price)
    return seconds, peak, price


def _least_costs(candidate: SearchCandidate) -> AllCosts:
    seconds, peak = candidate.least_cost(RankBy.time)
    return seconds, peak, candidate.least_cost(RankBy.price)[0]


def _dominates(one: AllCosts, other: AllCosts) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
