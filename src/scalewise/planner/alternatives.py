"""Alternatives to the best run of a search: runs that differ in one choice, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from scalewise.plan_config import RankBy
from scalewise.planner import layout_enumeration
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.memory_breakdown import entry_title
from scalewise.planner.search_result import SearchCandidate, SearchResult
from scalewise.planner.step_parts import step_part_title
from scalewise.run_config import RunConfig
from scalewise.units import format_bytes
from scalewise.validation.parallelism_rules import parallelism_issues
from scalewise.validation.run_issues import iter_issues

Choices = dict[str, Any]
SEQUENCES, LAYOUT = "sequences per forward pass", "layout"


@dataclass(frozen=True)
class Alternative:
    """Run that differs from the best in one choice."""

    choice: str
    """Name of the choice."""
    value: str
    """Value of the choice in this run."""
    reason: str
    """Reason why the run is not the best."""


def neighbor_alternatives(result: SearchResult) -> tuple[Alternative, ...]:
    """Return the runs that differ from the best in one choice, with their best micro-batch size."""
    best = result.best
    if best is None:
        return ()
    best_choices, groups = _neighbor_choices(best), dict[tuple[str, Any], list[SearchCandidate]]()
    for other in result.candidates:
        other_choices = _neighbor_choices(other)
        different = [name for name in best_choices if other_choices[name] != best_choices[name]]
        others = [name for name in different if name != SEQUENCES]
        if len(others or different) == 1:
            (name,) = others or different
            if name not in (SEQUENCES, LAYOUT) or _is_neighbor(
                best_choices[name], other_choices[name]
            ):
                groups.setdefault((name, other_choices[name]), []).append(other)
    rank = result.rank_by

    def order(other: SearchCandidate) -> tuple[bool, tuple[float, float]]:
        return not other.is_acceptable, other.cost(rank if other.is_acceptable else RankBy.memory)

    leaders = [(name, min(candidates, key=order)) for (name, _), candidates in groups.items()]
    leaders.sort(key=lambda it: (it[0] != LAYOUT, it[0], order(it[1])))
    alternatives = [
        Alternative(name, _choice_text(name, other), _reason_worse(best, other, rank))
        for name, other in leaders
    ]
    rejected = [
        Alternative(
            LAYOUT, layout_enumeration.layout_text(run.parallelism), str(next(iter_issues(run)))
        )
        for run in _rejected_neighbors(result, best)
    ]
    return (*alternatives, *rejected)


def _neighbor_choices(candidate: SearchCandidate) -> Choices:
    run = candidate.run
    return {
        LAYOUT: layout_enumeration.axis_sizes(run.parallelism),
        SEQUENCES: (layout_enumeration.sequences_per_forward(run),),
        "memory": run.memory.describe(run.model.layers),
        "loss": run.objective.loss_chunk,
        "option": " ".join(candidate.refinement) or "default",
        "training": candidate.training_overrides,
    }


def _is_neighbor(sizes: tuple[int, ...], other_sizes: tuple[int, ...]) -> bool:
    """Whether at most two mesh sizes differ, each by a factor of two."""
    different = [(a, b) for a, b in zip(sizes, other_sizes, strict=True) if a != b]
    return len(different) <= 2 and all(max(pair) == 2 * min(pair) for pair in different)


def _choice_text(name: str, candidate: SearchCandidate) -> str:
    run = candidate.run
    if name == LAYOUT:
        return layout_enumeration.layout_text(run.parallelism)
    if name == SEQUENCES:
        return str(layout_enumeration.sequences_per_forward(run))
    if name == "training":
        return " ".join(candidate.training_overrides) or "unchanged"
    return str(_neighbor_choices(candidate)[name])


def _rejected_neighbors(result: SearchResult, best: SearchCandidate) -> Iterator[RunConfig]:
    """Yield neighbors of the best layout that are invalid for every micro-batch size."""
    best_sizes = layout_enumeration.axis_sizes(best.run.parallelism)
    tried = {
        layout_enumeration.axis_sizes(candidate.run.parallelism) for candidate in result.candidates
    }
    for _, layout in layout_enumeration.enumerate_layouts(result.base_run, frozenset()):
        run, sizes = replace(best.run, parallelism=layout), layout_enumeration.axis_sizes(layout)
        if (
            sizes not in tried
            and _is_neighbor(best_sizes, sizes)
            and any(parallelism_issues(layout, run))
        ):
            yield run


def _reason_worse(best: SearchCandidate, other: SearchCandidate, rank: RankBy) -> str:
    """Return the main reason why ``other`` is worse than ``best``, or what it would save."""
    host = other.fit.host_breakdown
    if host is not None and other.fit.status is FitStatus.host_out_of_memory:
        largest = max(host.entries, key=lambda entry: entry.max_bytes).title
        capacity = format_bytes(other.fit.host_capacity)
        return f"a node needs {format_bytes(host.peak)} of {capacity}: {largest}"
    if not other.is_acceptable:
        lowest, _, highest = other.fit.reserved
        verb, size = "needs", lowest
        if other.fit.status is FitStatus.borderline:
            verb, size = "may need", highest
        capacity = format_bytes(other.fit.capacity or 0)
        return f"{verb} {format_bytes(size)} of {capacity}: {_grown_entry(best, other)}"
    increase = other.cost(rank)[0] / (best.cost(rank)[0] or 1) - 1
    if increase < 0:  # the best run has the fewest changes of training
        return f"{-increase:.0%} less {rank}, but changes the training"
    if rank is RankBy.memory:
        return f"{increase:+.0%} memory: {_grown_entry(best, other)}"
    slowed_part = _slowed_part(best, other)
    text = f"{increase:+.0%} {rank.value}"
    if other.training_overrides != best.training_overrides:
        text += ", changes the training"
    return f"{text}: {slowed_part}" if slowed_part else text


def _grown_entry(best: SearchCandidate, other: SearchCandidate) -> str:
    """Return the entry of the memory breakdown that grew most at the peak."""
    best_bytes = _bytes_at_peak(best)
    other_bytes = _bytes_at_peak(other)
    name = max(other_bytes, key=lambda it: other_bytes[it] - best_bytes.get(it, 0))
    return f"{entry_title(name)} {format_bytes(other_bytes[name])}"


def _bytes_at_peak(candidate: SearchCandidate) -> dict[str, int]:
    breakdown = candidate.fit.breakdown
    return {entry.name: entry.bytes.get(breakdown.peak_phase, 0) for entry in breakdown.entries}


def _slowed_part(best: SearchCandidate, other: SearchCandidate) -> str:
    """Return the part of the step that grew most, and its share of the step."""
    if best.step_time is None or other.step_time is None:
        return ""
    best_parts, other_parts = best.step_time.parts(), other.step_time.parts()
    increases = {part: seconds - best_parts.get(part, 0.0) for part, seconds in other_parts.items()}
    part = max(increases, key=lambda part: increases[part])
    if increases[part] <= 0:
        return ""
    return f"{step_part_title(part)} {other_parts[part] / other.step_time.seconds:.0%} of the step"
