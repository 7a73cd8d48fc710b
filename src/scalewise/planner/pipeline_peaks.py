"""Points of a pipeline schedule at which the memory of a rank may peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from scalewise.models.base import StageSlice
from scalewise.planner.rank_memory import RankMemory


@dataclass(frozen=True)
class PipelinePeakPoint:
    """State of a rank right before a backward pass through one of its stages.

    Forward passes are counted per stage.
    """

    waiting_passes: int = 0
    """Forward passes that wait for their backward, without the one that runs next."""
    finished_backwards: int = 0
    """Backward passes that have ended."""
    is_draining: bool = False
    """Whether the last pass of the rank was a backward."""


def iter_peak_points(rank_memory: RankMemory) -> Iterator[PipelinePeakPoint]:
    """Yield the points of a step at which the memory of a rank may peak.

    Without a pipeline this is the backward pass. In a pipeline there are up to three: the first
    backward, the last backward that follows a forward (gradients exist by then), and the backward
    after it, for which no parameters were resharded.
    """
    num_stages = len(rank_memory.stages)
    waiting_passes, finished_backwards = (
        rank_memory.in_flight - num_stages,
        rank_memory.num_pipeline_micro_batches * num_stages - rank_memory.in_flight,
    )
    yield PipelinePeakPoint(waiting_passes)
    if rank_memory.num_pipeline_micro_batches > 1 and finished_backwards:
        yield PipelinePeakPoint(waiting_passes, finished_backwards, is_draining=num_stages > 1)
    if rank_memory.num_pipeline_micro_batches > 1 and waiting_passes:
        yield PipelinePeakPoint(waiting_passes - 1, finished_backwards + 1, is_draining=True)


def iter_waiting_parts(
    rank_memory: RankMemory, peak_point: PipelinePeakPoint
) -> Iterator[StageSlice]:
    """Yield the stage of each waiting forward pass, except one pass per stage.

    A rank runs as many forward passes through a stage as there are pipeline ranks, then
    continues with its next stage.
    """
    stages, num_ranks = rank_memory.stages, rank_memory.pipeline_ranks
    pass_indices = range(peak_point.waiting_passes + len(stages))
    passes_by_stage = Counter(index // num_ranks % len(stages) for index in pass_indices)
    for stage, count in passes_by_stage.items():
        yield from repeat(stages[stage], count - 1)
