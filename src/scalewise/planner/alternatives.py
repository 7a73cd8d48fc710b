"""Why the neighbours of the best run of a search lost: one choice changed, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scalewise.planner import layout_enumeration
from scalewise.planner.config import RankBy
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.search import SearchCandidate, SearchResult
from scalewise.units import format_bytes

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

Choices = dict[str, Any]
ROWS, LAYOUT = "rows at once", "layout"


@dataclass(frozen=True)
class Alternative:
    """A neighbour: the choice that differs, and why it is not better."""

    choice: str
    value: str
    reason: str


def neighbor_alternatives(result: SearchResult) -> tuple[Alternative, ...]:
    """Returns the runs that differ from the best in one choice, each with its best micro batch."""
    best = result.best
    if best is None:
        return ()
    own, groups = _neighbor_choices(best), dict[tuple[str, Any], list[SearchCandidate]]()
    for other in result.candidates:
        theirs = _neighbor_choices(other)
        apart = [name for name in own if theirs[name] != own[name]]
        others = [name for name in apart if name != ROWS]
        if len(others or apart) == 1:
            (name,) = others or apart
            if name not in (ROWS, LAYOUT) or _is_neighbor(own[name], theirs[name]):
                groups.setdefault((name, theirs[name]), []).append(other)
    rank = result.rank_by

    def order(other: SearchCandidate) -> tuple[bool, tuple[float, float]]:
        return not other.is_acceptable, other.cost(rank if other.is_acceptable else RankBy.memory)

    leaders = [(name, min(alike, key=order)) for (name, _), alike in groups.items()]
    leaders.sort(key=lambda it: (it[0] != LAYOUT, it[0], order(it[1])))
    lost = [
        Alternative(name, _choice_text(name, other), _reason_worse(best, other, rank))
        for name, other in leaders
    ]
    refused = [
        Alternative(
            LAYOUT, layout_enumeration.layout_text(run.parallelism), str(next(run.validate()))
        )
        for run in _rejected_neighbors(result, best)
    ]
    return (*lost, *refused)


def _neighbor_choices(candidate: SearchCandidate) -> Choices:
    run = candidate.run
    return {
        LAYOUT: layout_enumeration.axis_sizes(run.parallelism),
        ROWS: (layout_enumeration.sequences_per_forward(run),),
        "memory": run.memory.describe(run.model.layers),
        "loss": run.objective.loss_chunk,
        "training": candidate.training_overrides,
    }


def _is_neighbor(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether at most two sizes differ, each by a factor of two."""
    apart = [(a, b) for a, b in zip(own, other, strict=True) if a != b]
    return len(apart) <= 2 and all(max(pair) == 2 * min(pair) for pair in apart)


def _choice_text(name: str, candidate: SearchCandidate) -> str:
    run = candidate.run
    if name == LAYOUT:
        return layout_enumeration.layout_text(run.parallelism)
    if name == ROWS:
        return str(layout_enumeration.sequences_per_forward(run))
    if name == "training":
        return " ".join(candidate.training_overrides) or "as asked"
    return str(_neighbor_choices(candidate)[name])


def _rejected_neighbors(result: SearchResult, best: SearchCandidate) -> Iterator[RunConfig]:
    """Yields runs of layouts near the best that cannot run, whatever their micro batch."""
    own = layout_enumeration.axis_sizes(best.run.parallelism)
    tried = {
        layout_enumeration.axis_sizes(candidate.run.parallelism) for candidate in result.candidates
    }
    for _, layout in layout_enumeration.enumerate_layouts(result.base_run, frozenset()):
        run, sizes = replace(best.run, parallelism=layout), layout_enumeration.axis_sizes(layout)
        if sizes not in tried and _is_neighbor(own, sizes) and any(layout.validate_with(run)):
            yield run


def _reason_worse(best: SearchCandidate, other: SearchCandidate, rank: RankBy) -> str:
    """Returns the largest thing that makes ``other`` worse than ``best``, or what it would gain."""
    host = other.fit.host_breakdown
    if host is not None and other.fit.status is FitStatus.host_out_of_memory:
        what = max(host.entries, key=lambda line: line.max_bytes).name
        capacity = format_bytes(other.fit.host_capacity)
        return f"a node needs {format_bytes(host.peak)} of {capacity}: {what}"
    if not other.is_acceptable:
        least, _, most = other.fit.reserved
        command, size = "needs", least
        if other.fit.status is FitStatus.borderline:
            command, size = "may need", most
        there = format_bytes(other.fit.capacity or 0)
        return f"{command} {format_bytes(size)} of {there}: {_grown_entry(best, other)}"
    more = other.cost(rank)[0] / (best.cost(rank)[0] or 1) - 1
    if more < 0:  # the best of those that are trained like this one
        return f"{-more:.0%} less {rank}, but trained otherwise"
    if rank is RankBy.memory:
        return f"{more:+.0%} memory: {_grown_entry(best, other)}"
    share = _slowed_part(best, other)
    text = f"{more:+.0%} {rank.value}"
    if other.training_overrides != best.training_overrides:
        text += ", trained otherwise"
    return f"{text}: {share}" if share else text


def _grown_entry(best: SearchCandidate, other: SearchCandidate) -> str:
    """Returns the line of the ledger that grew most, at the peaks."""
    before = _bytes_at_peak(best)
    now = _bytes_at_peak(other)
    what = max(now, key=lambda line: now[line] - before.get(line, 0))
    return f"{what} {format_bytes(now[what])}"


def _bytes_at_peak(candidate: SearchCandidate) -> dict[str, int]:
    breakdown = candidate.fit.breakdown
    return {line.name: line.bytes.get(breakdown.peak_phase, 0) for line in breakdown.entries}


def _slowed_part(best: SearchCandidate, other: SearchCandidate) -> str:
    """Returns the part of the step that grew most, and its share."""
    if best.step_time is None or other.step_time is None:
        return ""
    before, now = best.step_time.parts(), other.step_time.parts()
    grown = {what: seconds - before.get(what, 0.0) for what, seconds in now.items()}
    what = max(grown, key=lambda part: grown[part])
    if grown[what] <= 0:
        return ""
    return f"{what} {now[what] / other.step_time.seconds:.0%} of the step"
