"""Idle time of pipeline ranks: formulas against torch's own order of actions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from fixtures.torch_schedules import actions_by_rank
from torch.distributed.pipelining.schedules import _ComputationType

from scalewise.parallelism.mesh import PipelineSchedule
from scalewise.planner.pipeline_bubble import StageSeconds, bubble_seconds
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig

INTERLEAVED = (
    PipelineSchedule.interleaved_1f1b,
    PipelineSchedule.interleaved_zero_bubble,
    PipelineSchedule.zbv_zero_bubble,
)
PASSES: Mapping[_ComputationType, str] = {
    _ComputationType.FORWARD: "F",
    _ComputationType.FULL_BACKWARD: "IW",
    _ComputationType.BACKWARD_INPUT: "I",
    _ComputationType.BACKWARD_WEIGHT: "W",
}
"""Passes of an action: forward, gradients of inputs, gradients of weights."""


def step_seconds(actions: Sequence[list[Any]], num_stages: int, stage: StageSeconds) -> float:
    """Time until the last rank has finished, where each action waits for its inputs."""
    duration = {"F": stage.forward, "I": stage.input_backward, "W": stage.weight_backward}
    finished: dict[tuple[str, int, int], float] = {}
    waiting, clocks = [list(each) for each in actions], [0.0] * len(actions)
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, queue in enumerate(waiting):
            while queue:
                index, batch = queue[0].stage_index, queue[0].microbatch_index
                passes = PASSES[queue[0].computation_type]
                inputs = {
                    "F": [("F", index - 1, batch)] * (index > 0),
                    "I": [
                        ("F", index, batch),
                        *[("I", index + 1, batch)] * (index < num_stages - 1),
                    ],
                    "W": [("I", index, batch)],
                }[passes[0]]
                if not finished.keys() >= set(inputs):
                    break
                start = max([clocks[rank], *(finished[each] for each in inputs)])
                clocks[rank] = start + sum(duration[each] for each in passes)
                finished |= {(each, index, batch): clocks[rank] for each in passes}
                queue.pop(0)
        assert sum(map(len, waiting)) < before, "deadlock"
    return max(clocks)


def simulated_bubble(
    schedule: PipelineSchedule, stage: StageSeconds, ranks: int, micro_batches: int
) -> float:
    stages = 2
    actions = actions_by_rank(schedule, ranks, stages, micro_batches)
    total = step_seconds(actions, ranks * stages, stage)
    return total - micro_batches * stages * stage.both_passes


@pytest.mark.parametrize("schedule", INTERLEAVED)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubble_of_equal_passes_equals_that_of_torch(
    schedule: PipelineSchedule, ranks: int
) -> None:
    stage = StageSeconds(1, 1, 1)
    for micro_batches in (2 * ranks, 4 * ranks):
        expected = simulated_bubble(schedule, stage, ranks, micro_batches)
        assert bubble_seconds(schedule, stage, ranks, micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_bubble_of_unequal_passes_is_near_that_of_torch(schedule: PipelineSchedule) -> None:
    generator = random.Random(1)
    exact = schedule is PipelineSchedule.interleaved_1f1b
    for _ in range(100):
        stage = StageSeconds(1, generator.uniform(0.8, 1.6), generator.uniform(0, 1.2))
        ranks = generator.choice([2, 3, 4, 6, 8])
        micro_batches = ranks * generator.choice([2, 3, 4])
        expected = simulated_bubble(schedule, stage, ranks, micro_batches)
        bubble = bubble_seconds(schedule, stage, ranks, micro_batches)
        assert bubble == pytest.approx(expected, rel=1e-6 if exact else 0.15), (stage, ranks)


def test_zero_bubble_schedules_shorten_the_step(compose: Callable[..., RunConfig]) -> None:
    bubbles = {}
    for schedule in INTERLEAVED:
        run = compose(
            *("model=llama3_8b", "hardware=h100", "hardware.devices_per_node=8"),
            *("parallelism=pipeline", "parallelism.pipeline=4", "precision=bf16_mixed"),
            *("data=synthetic", "data.sequence=4096", "trainer.micro_batch=8"),
            f"parallelism.pipeline_schedule={schedule.name}",
            check_machine=False,
        )
        step = predict_step_time(run)
        assert step is not None
        bubbles[schedule] = step.pipeline_bubble / (step.seconds - step.pipeline_bubble)
    one_f_one_b, zero_bubble, zbv = bubbles.values()
    assert one_f_one_b == pytest.approx(3 / 16, rel=0.05)  # (ranks - 1) / (micro-batches x stages)
    # A third if forward, input and weight gradients took as long; attention has no weights.
    for bubble in (zero_bubble, zbv):
        assert one_f_one_b / 3 < bubble < 0.6 * one_f_one_b
