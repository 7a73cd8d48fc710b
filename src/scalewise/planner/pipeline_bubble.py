"""Idle time of the ranks of a pipeline, by its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.parallelism.mesh import PipelineSchedule


@dataclass(frozen=True)
class StageSeconds:
    """Times of one micro-batch in a pipeline stage, in seconds."""

    forward: float
    """Forward pass."""
    input_backward: float
    """Backward pass without the gradients of weights."""
    weight_backward: float
    """Gradients of the weights."""

    @property
    def both_passes(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.input_backward + self.weight_backward


def bubble_seconds(
    schedule: PipelineSchedule, stage: StageSeconds, ranks: int, micro_batches: int
) -> float:
    """Return the idle time of a rank in one pass through the schedule, in seconds.

    Interleaving divides the time of a stage and thus the bubble (Narayanan et al., 2021). A split
    backward computes weight gradients while a rank would wait (Qi et al., 2023). The formulas of
    split backward passes approximate the idle time of torch's order of actions: exact if forward,
    input and weight gradients take as long, else within 15 % from 2 x ranks micro-batches on.

    Args:
        schedule: Pipeline schedule.
        stage: Times of a stage.
        ranks: Pipeline ranks.
        micro_batches: Micro-batches of the schedule.
    """
    longest = max(stage.forward, stage.input_backward)
    if schedule is PipelineSchedule.interleaved_zero_bubble:
        unfilled = stage.forward + stage.input_backward - stage.weight_backward
        return (ranks - 1) * max(longest, unfilled)
    if schedule is PipelineSchedule.zbv_zero_bubble:
        weight = stage.weight_backward
        slot = max(longest, weight)
        missing = max(0, 2 * ranks - 1 - micro_batches)  # torch orders them, and skips them
        return (ranks - 1) * max(slot, 2 * (longest - weight)) + missing * min(2 * weight, slot)
    return (ranks - 1) * stage.both_passes
