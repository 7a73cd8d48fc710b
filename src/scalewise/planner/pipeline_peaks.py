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

    ``waiting_passes``: those that wait besides the piece; ``finished_backwards``: those that have
    been backward;
    ``is_draining``: whether the last before it, through any part, was one of these, and no forward.
    """

    waiting_passes: int = 0
    finished_backwards: int = 0
    is_draining: bool = False


def iter_peak_moments(rank_memory: RankMemory) -> Iterator[PipelineMoment]:
    """Yields when a rank may be fullest.

    In a pipeline that is with the first piece that goes backward; then with the last that follows
    a forward, when there are gradients; then with the next, for which nobody has dropped weights.
    """
    parts = len(rank_memory.stages)
    others, done = (
        rank_memory.in_flight - parts,
        rank_memory.num_pipeline_micro_batches * parts - rank_memory.in_flight,
    )
    yield PipelineMoment(others)
    if rank_memory.num_pipeline_micro_batches > 1 and done:
        yield PipelineMoment(others, done, is_draining=parts > 1)
    if rank_memory.num_pipeline_micro_batches > 1 and others:
        yield PipelineMoment(others - 1, done + 1, is_draining=True)


def iter_waiting_parts(rank_memory: RankMemory, moment: PipelineMoment) -> Iterator[StageSlice]:
    """Yields the part that each waiting pass went through, but for one pass through each.

    Forwards go through a part as often as there are places, then through the next.
    """
    parts, places = rank_memory.stages, rank_memory.pipeline_ranks
    turns = range(moment.waiting_passes + len(parts))
    passes = Counter(turn // places % len(parts) for turn in turns)
    for place, count in passes.items():
        yield from repeat(parts[place], count - 1)
