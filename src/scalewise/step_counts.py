"""Number of samples or micro-batches in each optimizer step, when it differs between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class StepCounts:
    """Number of units of each optimizer step, such as samples; constant within a stage."""

    final: int
    """Number of units of a step after all stages."""
    stages: tuple[tuple[int, int], ...] = ()
    """Number of steps until the end of each stage, and the units of each of its steps."""

    def at(self, step: int) -> int:
        """Number of units of a step, which counts from 0."""
        for end, count in self.stages:
            if step < end:
                return count
        return self.final

    def before(self, step: int) -> int:
        """Number of units of all steps before ``step``."""
        if not self.stages:
            return step * self.final
        total = 0
        for start, length, count in self.iter_stages(step):
            total += min(length, step - start) * count
        return total

    def locate(self, position: int) -> tuple[int, int]:
        """Step of the unit at a position of the run, and its position within that step."""
        start = 0
        for end, count in self.stages:
            if position < (end - start) * count:
                step, offset = divmod(position, count)
                return start + step, offset
            position -= (end - start) * count
            start = end
        step, offset = divmod(position, self.final)
        return start + step, offset

    def is_step_end(self, position: int) -> bool:
        """Whether a step ends before the unit at a position of the run."""
        if not self.stages:
            return position % self.final == 0
        return self.locate(position)[1] == 0

    def steps_for(self, total: float) -> int:
        """Smallest number of steps that have ``total`` units or more."""
        start = 0
        for end, count in self.stages:
            if total <= (end - start) * count:
                return start + ceil(total / count)
            total -= (end - start) * count
            start = end
        return start + ceil(total / self.final)

    def convert(self, count_units: Callable[[int], int]) -> StepCounts:
        """The same steps in another unit."""
        stages = tuple((end, count_units(count)) for end, count in self.stages)
        return StepCounts(count_units(self.final), stages)

    def multiply(self, other: StepCounts) -> StepCounts:
        """Product of two counts of each step, with the stages of both."""
        ends = sorted({end for end, _ in (*self.stages, *other.stages)})
        stages = tuple((end, self.at(end - 1) * other.at(end - 1)) for end in ends)
        return StepCounts(self.final * other.final, stages)

    def iter_stages(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """Yield first step, number of steps and units of a step, of each stage of a run.

        Args:
            steps: Length of the run, in steps.
        """
        start = 0
        for end, count in (*self.stages, (steps, self.final)):
            if start < min(end, steps):
                yield start, min(end, steps) - start, count
                start = min(end, steps)
