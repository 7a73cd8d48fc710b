"""Training order of a mixture: which source each sample comes from, as a function of its position.

A position counts the samples of training, over all global batches. The order depends neither on
the number of ranks nor on the micro-batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalewise.data.datasets import ShuffleOrder
from scalewise.data.synthetic_datasets import splitmix64
from scalewise.errors import DataError
from scalewise.step_counts import StepCounts


@dataclass(frozen=True)
class WeightedInterleaving:
    """Endless interleaving of sources by fixed weights, random but balanced.

    Item n of source k has the time ``(n + u) / weights[k]``, where u in [0, 1) is a hash of
    (seed, k, n); the order is that of times. So each source has, among the first p items, its
    expected number ``p * weights[k]`` to within a few, and items at any position are found without
    those before them.
    """

    seed: int
    """Key of the hash."""
    weights: tuple[float, ...]
    """Fraction of the items of each source; the sum is 1."""

    def window(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``source_B`` and ``number_B``, the number within its source, from ``first`` on."""
        # Source k has between w t - 1 and w t + 1 items before time t; one more covers rounding.
        slack = 2 * len(self.weights)
        lows = self.counts_before(first - slack)
        highs = self.counts_before(first + count + slack)
        numbers = [np.arange(low, high) for low, high in zip(lows, highs, strict=True)]
        source_N = np.repeat(np.arange(len(numbers)), [len(it) for it in numbers])
        number_N = np.concatenate(numbers)
        time_N = np.concatenate([self._times(k, it) for k, it in enumerate(numbers)])
        start = first - sum(lows)
        order_B = np.lexsort((source_N, time_N))[start : start + count]
        return source_N[order_B], number_N[order_B]

    def counts_before(self, time: float) -> list[int]:
        """Number of items of each source before a time."""
        return [self._count_before(source, time) for source in range(len(self.weights))]

    def counts_at(self, position: int) -> list[int]:
        """Number of items of each source before a position."""
        lows = self.counts_before(position - 2 * len(self.weights))
        source_B, _ = self.window(sum(lows), position - sum(lows))
        added = np.bincount(source_B, minlength=len(lows))
        return [low + int(count) for low, count in zip(lows, added, strict=True)]

    def position_of(self, source: int, number: int) -> int:
        """Position of an item of a source."""
        time = float(self._times(source, np.array([number]))[0])
        slack = 2 * len(self.weights)
        first = max(0, int(time) - slack)
        source_B, number_B = self.window(first, 2 * slack + 2)
        return first + int(np.flatnonzero((source_B == source) & (number_B == number))[0])

    def _count_before(self, source: int, time: float) -> int:
        if time <= 0 or not self.weights[source]:
            return 0
        number = max(0, int(self.weights[source] * time) - 1)
        while self._times(source, np.array([number]))[0] < time:
            number += 1
        return number

    def _times(self, source: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        key = splitmix64(np.array([self.seed, source], dtype=np.uint64))
        hashes = splitmix64(numbers.astype(np.uint64) ^ key[0] ^ splitmix64(key[1:])[0])
        times: NDArray[np.float64] = (numbers + (hashes >> np.uint64(11)) / 2.0**53) / (
            self.weights[source] or 1.0
        )
        return times


@dataclass(frozen=True)
class Segment:
    """Range of positions with fixed weights: a stage, or its part until a source is used up."""

    first: int
    """First position."""
    counts: tuple[int, ...]
    """Number of samples of each source before the segment."""
    interleaving: WeightedInterleaving
    """Order of the sources."""


class MixtureOrder:
    """Sample indices of every step of a mixture; those of source k follow those of source k - 1.

    Args:
        sizes: Number of samples of each source, by name.
        stages: Start of each stage, as a fraction of training, and the weights of the sources.
        max_repetitions: Largest number of epochs of the sources that have one.
        seed: Seed of the run.
        samples_per_step: Samples of each optimizer step.
        steps: Length of training, in optimizer steps.

    Raises:
        DataError: all sources with a weight are read ``max_repetitions`` times before the end.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stages: Sequence[tuple[float, Mapping[str, float]]],
        max_repetitions: Mapping[str, float],
        *,
        seed: int,
        samples_per_step: StepCounts,
        steps: int,
    ) -> None:
        self._samples_per_step, self._total = samples_per_step, samples_per_step.before(steps)
        self._names, self._max_repetitions = [*sizes], max_repetitions
        self._offsets = np.cumsum([0, *sizes.values()])
        # The seed of each source is that of the run: a mixture of one source has its order.
        self._orders = [ShuffleOrder(size, seed, 1) for size in sizes.values()]
        self._limits = [
            int(max_repetitions[name] * size) if name in max_repetitions else None
            for name, size in sizes.items()
        ]
        self.segments: list[Segment] = []
        counts, first = [0] * len(sizes), 0
        ends = [samples_per_step.before(round(start * steps)) for start, _ in stages[1:]]
        for (_, weights), end in zip(stages, [*ends, self._total], strict=True):
            while first < end:
                first = self._add_segment(weights, seed, first, end, counts)

    def _add_segment(
        self, weights: Mapping[str, float], seed: int, first: int, end: int, counts: list[int]
    ) -> int:
        """Add a segment from ``first``; update ``counts`` to its end, which is returned."""
        limits = zip(self._limits, counts, strict=True)
        left = [None if limit is None else limit - count for limit, count in limits]
        active = [
            0.0 if rest == 0 else weights[name]
            for name, rest in zip(self._names, left, strict=True)
        ]
        if not sum(active):
            raise self._exhausted_error(weights, first)
        normalized = tuple(weight / sum(active) for weight in active)
        interleaving = WeightedInterleaving(seed * 1_000_003 + len(self.segments), normalized)
        self.segments.append(Segment(first, tuple(counts), interleaving))
        for source, rest in enumerate(left):
            if rest and normalized[source] and rest <= end - first:
                end = min(end, first + interleaving.position_of(source, rest - 1) + 1)
        for source, number in enumerate(interleaving.counts_at(end - first)):
            counts[source] += number
        return end

    def _exhausted_error(self, weights: Mapping[str, float], position: int) -> DataError:
        names = [name for name in self._max_repetitions if weights[name]]
        step, steps = (self._samples_per_step.locate(it)[0] for it in (position, self._total))
        reason = f"is reached by all sources with a weight after {step} of {steps} steps"
        key = f"data.sources.{names[0]}.max_repetitions"
        fix = f"set {key}=null" + f" or trainer.max_steps={step}" * bool(step)
        return DataError.for_key(key, self._max_repetitions[names[0]], reason, fix)

    def indices(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Return ``index_B``, the samples at ``count`` positions of a step's global batch."""
        # A micro-batch of padding alone reads one sample, which may be after the last.
        position = min(self._samples_per_step.before(step) + first, self._total - count)
        parts = []
        firsts = [segment.first for segment in self.segments]
        while count:
            number = int(np.searchsorted(firsts, position, side="right")) - 1
            end = firsts[number + 1] if number + 1 < len(firsts) else self._total
            length = min(count, end - position)
            parts.append(self._segment_indices(self.segments[number], position, length))
            position, count = position + length, count - length
        return np.concatenate(parts)

    def _segment_indices(self, segment: Segment, position: int, count: int) -> NDArray[np.int64]:
        source_B, number_B = segment.interleaving.window(position - segment.first, count)
        index_B = np.empty(count, dtype=np.int64)
        for source in np.unique(source_B):
            mask_B = source_B == source
            first = segment.counts[source] + int(number_B[mask_B][0])  # numbers are consecutive
            indices = self._orders[source].indices(first, 0, int(mask_B.sum()))
            index_B[mask_B] = indices + self._offsets[source]
        return index_B
