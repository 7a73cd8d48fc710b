"""Order of passes of pipeline schedules that compute the gradients of inputs and weights apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from scalewise.cached_hash import cache_hash
from scalewise.parallelism.mesh import PipelineSchedule


class PassKind(StrEnum):
    """Part of the work on one micro-batch in one stage; values are torch's letters."""

    forward = "F"
    """Forward pass."""
    input_backward = "I"
    """Gradients of the input of the stage."""
    weight_backward = "W"
    """Gradients of the weights of the stage."""


class StagePass(NamedTuple):
    """Pass of one micro-batch through one stage of a rank."""

    kind: PassKind
    """What the pass computes."""
    stage: int
    """Index of the stage among those of the rank."""
    micro_batch: int
    """Index of the micro-batch."""


class SplitPoint(NamedTuple):
    """State of a rank right before a pass; counts are per stage of the rank."""

    kind: PassKind
    """Pass that runs next."""
    stage: int
    """Index of its stage among those of the rank."""
    waiting: tuple[int, ...]
    """Micro-batches between their forward and their input backward."""
    deferred: tuple[int, ...]
    """Micro-batches between their input backward and their weight backward."""
    finished_inputs: tuple[int, ...]
    """Micro-batches whose input backward has ended."""
    finished: tuple[int, ...]
    """Micro-batches whose weight backward has ended."""
    follows_backward: tuple[bool, ...]
    """Whether the last pass through the stage was a backward, or none has run."""
    follows_weights: tuple[bool, ...]
    """Whether the last backward of the stage was a weight backward."""
    continues_backward: tuple[bool, ...]
    """Whether an input backward of the stage has run after a weight backward."""


@cache_hash
@dataclass(frozen=True)
class SplitSchedule:
    """Schedule of one rank of a pipeline whose backward is split."""

    schedule: PipelineSchedule
    """Pipeline schedule."""
    pipeline_ranks: int
    """Number of pipeline ranks."""
    pipeline_rank: int
    """Index of this rank."""
    stages_per_rank: int
    """Number of stages of the rank."""
    micro_batches: int
    """Number of micro-batches of the schedule."""

    @property
    def passes(self) -> tuple[StagePass, ...]:
        """Passes of the rank, in torch's order."""
        return _ordered_passes(self)

    @property
    def points(self) -> tuple[SplitPoint, ...]:
        """Distinct states of the rank before its passes."""
        return _distinct_points(self)

    @property
    def max_in_flight(self) -> int:
        """Maximum number of forward passes whose tensors wait for a backward pass."""
        return max(sum(point.waiting) + sum(point.deferred) for point in self.points)

    def has_local_next(self, stage: int) -> bool:
        """Whether the next stage of the model is on this rank too, at the end of a V."""
        is_end = self.pipeline_rank == self.pipeline_ranks - 1
        return self.schedule.is_v_shaped and is_end and stage == 0


@lru_cache(maxsize=1024)
def _ordered_passes(schedule: SplitSchedule) -> tuple[StagePass, ...]:
    if schedule.schedule.is_v_shaped:
        passes = _v_shaped_passes(schedule)
        # torch orders enough micro-batches to fill the pipeline, and skips those that are missing.
        return tuple(it for it in passes if it.micro_batch < schedule.micro_batches)
    return tuple(_interleaved_passes(schedule))


def _v_shaped_passes(schedule: SplitSchedule) -> Iterator[StagePass]:
    """Yield the passes of ``ScheduleZBVZeroBubble``: stage 0 goes down the V, stage 1 up."""
    ranks, rank = schedule.pipeline_ranks, schedule.pipeline_rank
    total = max(2 * ranks - 1, schedule.micro_batches)
    counts: dict[tuple[str, int], int] = {}

    def run(passes: str, stage: int) -> Iterator[StagePass]:
        for letter in passes:
            micro_batch = counts.get((letter, stage), 0)
            counts[letter, stage] = micro_batch + 1
            yield StagePass(PassKind(letter), stage, micro_batch)

    for _ in range(2 * (ranks - rank) - 1):
        yield from run("F", 0)
    for _ in range(rank):
        yield from run("F", 1)
        yield from run("F", 0)
    for _ in range(ranks - rank):
        yield from run("FIW", 1)
    while counts.get(("F", 1), 0) < counts["F", 0] or counts["F", 0] < total:
        if counts["F", 0] < total:
            yield from run("F", 0)
        yield from run("IW", 0)
        yield from run("FIW", 1)
    for _ in range(rank):
        yield from run("I", 0)
        yield from run("I", 1)
    for _ in range(ranks - rank):
        yield from run("IW", 0)
    for stage in (1, 0):
        while counts.get(("W", stage), 0) < counts["I", stage]:
            yield from run("W", stage)


def _interleaved_passes(schedule: SplitSchedule) -> Iterator[StagePass]:
    """Yield the passes of ``ScheduleInterleavedZeroBubble``.

    A rank runs a round of micro-batches through a stage before it continues with its next stage. It
    defers the weight gradients of as many micro-batches as there are ranks before it.
    """
    ranks, rank, stages = (
        schedule.pipeline_ranks,
        schedule.pipeline_rank,
        schedule.stages_per_rank,
    )
    round_length = schedule.micro_batches // max(1, schedule.micro_batches // ranks)
    total = schedule.micro_batches * stages
    warm_up = min((stages - 1) * round_length + ranks - 1 - rank, total)
    counts: dict[tuple[PassKind, int], int] = {}

    def build_pass(kind: PassKind, index: int) -> StagePass:
        stage = index // round_length % stages
        if kind is not PassKind.forward:
            stage = stages - 1 - stage
        micro_batch = counts.get((kind, stage), 0)
        counts[kind, stage] = micro_batch + 1
        return StagePass(kind, stage, micro_batch)

    for index in range(total + warm_up):
        if index < total:
            yield build_pass(PassKind.forward, index)
        backward = index - warm_up
        if backward >= 0:
            yield build_pass(PassKind.input_backward, backward)
        if backward >= rank:
            yield build_pass(PassKind.weight_backward, backward - rank)
    for backward in range(max(0, total - rank), total):
        yield build_pass(PassKind.weight_backward, backward)


@lru_cache(maxsize=1024)
def _distinct_points(schedule: SplitSchedule) -> tuple[SplitPoint, ...]:
    """Return the last point of each state; counts of finished micro-batches only grow.

    Whether some or all micro-batches have finished is part of the state.
    """
    stages = schedule.stages_per_rank
    counts = {kind: [0] * stages for kind in PassKind}
    follows_backward, follows_weights, continues_backward = (
        [value] * stages for value in (True, False, False)
    )
    points: dict[object, SplitPoint] = {}
    for kind, stage, _ in schedule.passes:
        forwards, inputs, finished = counts.values()
        point = SplitPoint(
            kind,
            stage,
            tuple(a - b for a, b in zip(forwards, inputs, strict=True)),
            tuple(a - b for a, b in zip(inputs, finished, strict=True)),
            tuple(inputs),
            tuple(finished),
            tuple(follows_backward),
            tuple(follows_weights),
            tuple(continues_backward),
        )
        progress = tuple((count > 0, count == schedule.micro_batches) for count in finished)
        points[(*point[:4], progress, *point[6:])] = point
        counts[kind][stage] += 1
        follows_backward[stage] = kind is not PassKind.forward
        if kind is PassKind.input_backward:
            continues_backward[stage] |= follows_weights[stage]
        if kind is not PassKind.forward:
            follows_weights[stage] = kind is PassKind.weight_backward
    return tuple(points.values())
