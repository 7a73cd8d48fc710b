"""When a rank of a pipeline may be fullest, and which passes wait there then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from scalewise.models.base import StageSlice
from scalewise.parallelism.rank_memory import RankMemory


@dataclass(frozen=True)
class PipelineMoment:
    """When a rank is about to take a piece backward, in passes of one part each.

    ``others``: those that wait besides the piece; ``done``: those that have been backward;
    ``drains``: whether the last before it, through any part, was one of these, and no forward.
    """

    others: int = 0
    done: int = 0
    drains: bool = False


def iter_peak_moments(holds: RankMemory) -> Iterator[PipelineMoment]:
    """Yields when a rank may be fullest.

    In a pipeline that is with the first piece that goes backward; then with the last that follows
    a forward, when there are gradients; then with the next, for which nobody has dropped weights.
    """
    parts = len(holds.parts)
    others, done = holds.in_flight - parts, holds.pieces * parts - holds.in_flight
    yield PipelineMoment(others)
    if holds.pieces > 1 and done:
        yield PipelineMoment(others, done, drains=parts > 1)
    if holds.pieces > 1 and others:
        yield PipelineMoment(others - 1, done + 1, drains=True)


def iter_waiting_parts(holds: RankMemory, moment: PipelineMoment) -> Iterator[StageSlice]:
    """Yields the part that each waiting pass went through, but for one pass through each.

    Forwards go through a part as often as there are places, then through the next.
    """
    parts, places = holds.parts, holds.places
    turns = range(moment.others + len(parts))
    passes = Counter(turn // places % len(parts) for turn in turns)
    for place, count in passes.items():
        yield from repeat(parts[place], count - 1)
