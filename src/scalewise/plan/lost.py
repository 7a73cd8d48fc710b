"""Why the neighbours of the best run of a search lost: one choice changed, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scalewise.plan import layouts
from scalewise.plan.search import Candidate, Found
from scalewise.plan.spec import Rank
from scalewise.plan.verdict import Verdict
from scalewise.units import bytes_text

if TYPE_CHECKING:
    from scalewise.run import Run

Choices = dict[str, Any]
ROWS, LAYOUT = "rows at once", "layout"


@dataclass(frozen=True)
class Lost:
    """A neighbour: the choice that differs, and why it is not better."""

    choice: str
    what: str
    why: str


def neighbours(found: Found) -> tuple[Lost, ...]:
    """Returns the runs that differ from the best in one choice, each with its best micro batch."""
    best = found.best
    if best is None:
        return ()
    own, groups = _choices(best), dict[tuple[str, Any], list[Candidate]]()
    for other in found.candidates:
        theirs = _choices(other)
        apart = [name for name in own if theirs[name] != own[name]]
        others = [name for name in apart if name != ROWS]
        if len(others or apart) == 1:
            (name,) = others or apart
            if name not in (ROWS, LAYOUT) or _near(own[name], theirs[name]):
                groups.setdefault((name, theirs[name]), []).append(other)
    rank = found.rank

    def order(other: Candidate) -> tuple[bool, tuple[float, float]]:
        return not other.good, other.cost(rank if other.good else Rank.memory)

    leaders = [(name, min(alike, key=order)) for (name, _), alike in groups.items()]
    leaders.sort(key=lambda it: (it[0] != LAYOUT, it[0], order(it[1])))
    lost = [Lost(name, _text(name, other), _why(best, other, rank)) for name, other in leaders]
    refused = [
        Lost(LAYOUT, layouts.described(run.parallelism), str(next(run.complaints())))
        for run in _refused(found, best)
    ]
    return (*lost, *refused)


def _choices(candidate: Candidate) -> Choices:
    run = candidate.run
    return {
        LAYOUT: layouts.sizes(run.parallelism),
        ROWS: (layouts.rows_at_once(run),),
        "memory": run.memory.described(run.model.layers),
        "loss": run.objective.loss_chunk,
        "training": candidate.training,
    }


def _near(own: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether at most two sizes differ, each by a factor of two."""
    apart = [(a, b) for a, b in zip(own, other, strict=True) if a != b]
    return len(apart) <= 2 and all(max(pair) == 2 * min(pair) for pair in apart)


def _text(name: str, candidate: Candidate) -> str:
    run = candidate.run
    if name == LAYOUT:
        return layouts.described(run.parallelism)
    if name == ROWS:
        return str(layouts.rows_at_once(run))
    if name == "training":
        return " ".join(candidate.training) or "as asked"
    return str(_choices(candidate)[name])


def _refused(found: Found, best: Candidate) -> Iterator[Run]:
    """Yields runs of layouts near the best that cannot run, whatever their micro batch."""
    own = layouts.sizes(best.run.parallelism)
    tried = {layouts.sizes(candidate.run.parallelism) for candidate in found.candidates}
    for _, layout in layouts.every(found.asked, frozenset()):
        run, sizes = replace(best.run, parallelism=layout), layouts.sizes(layout)
        if sizes not in tried and _near(own, sizes) and any(layout.complaints_with(run)):
            yield run


def _why(best: Candidate, other: Candidate, rank: Rank) -> str:
    """Returns the largest thing that makes ``other`` worse than ``best``, or what it would gain."""
    host = other.fit.host
    if host is not None and other.fit.verdict is Verdict.host_out_of_memory:
        what = max(host.lines, key=lambda line: line.most).what
        capacity = bytes_text(other.fit.host_capacity)
        return f"a node needs {bytes_text(host.peak)} of {capacity}: {what}"
    if not other.good:
        least, _, most = other.fit.reserved
        verb, size = "needs", least
        if other.fit.verdict is Verdict.borderline:
            verb, size = "may need", most
        there = bytes_text(other.fit.capacity or 0)
        return f"{verb} {bytes_text(size)} of {there}: {_grown(best, other)}"
    more = other.cost(rank)[0] / (best.cost(rank)[0] or 1) - 1
    if more < 0:  # the best of those that are trained like this one
        return f"{-more:.0%} less {rank}, but trained otherwise"
    if rank is Rank.memory:
        return f"{more:+.0%} memory: {_grown(best, other)}"
    share = _slowed(best, other)
    text = f"{more:+.0%} {rank.value}"
    if other.training != best.training:
        text += ", trained otherwise"
    return f"{text}: {share}" if share else text


def _grown(best: Candidate, other: Candidate) -> str:
    """Returns the line of the ledger that grew most, at the peaks."""
    before = _at_peak(best)
    now = _at_peak(other)
    what = max(now, key=lambda line: now[line] - before.get(line, 0))
    return f"{what} {bytes_text(now[what])}"


def _at_peak(candidate: Candidate) -> dict[str, int]:
    ledger = candidate.fit.ledger
    return {line.what: line.bytes.get(ledger.fullest, 0) for line in ledger.lines}


def _slowed(best: Candidate, other: Candidate) -> str:
    """Returns the part of the step that grew most, and its share."""
    if best.step is None or other.step is None:
        return ""
    before, now = best.step.parts(), other.step.parts()
    grown = {what: seconds - before.get(what, 0.0) for what, seconds in now.items()}
    what = max(grown, key=lambda part: grown[part])
    if grown[what] <= 0:
        return ""
    return f"{what} {now[what] / other.step.seconds:.0%} of the step"
