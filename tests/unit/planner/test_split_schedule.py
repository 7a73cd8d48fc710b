"""Order of passes of schedules with a split backward: the planner's against torch's."""

from __future__ import annotations

import pytest
from fixtures.torch_schedules import actions_by_rank

from scalewise.parallelism.mesh import PipelineSchedule
from scalewise.planner.split_schedule import PassKind, SplitSchedule

INTERLEAVED, V_SHAPED = (
    PipelineSchedule.interleaved_zero_bubble,
    PipelineSchedule.zbv_zero_bubble,
)


@pytest.mark.parametrize(
    ("schedule", "stages"), [(V_SHAPED, 2), (INTERLEAVED, 1), (INTERLEAVED, 2), (INTERLEAVED, 3)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_order_of_passes_equals_that_of_torch(
    schedule: PipelineSchedule, stages: int, ranks: int
) -> None:
    for micro_batches in (ranks, ranks + 1, 2 * ranks, 3 * ranks, 4 * ranks):
        if schedule is INTERLEAVED and micro_batches % (micro_batches // ranks):
            continue  # torch rejects it
        actions = actions_by_rank(schedule, ranks, stages, micro_batches)
        for rank in range(ranks):
            indices = range(rank, ranks * stages, ranks)
            if schedule is V_SHAPED:
                indices = [rank, 2 * ranks - 1 - rank]
            passes = SplitSchedule(schedule, ranks, rank, stages, micro_batches).passes
            order = [f"{indices[it.stage]}{it.kind}{it.micro_batch}" for it in passes]
            assert order == [repr(action) for action in actions[rank]], (micro_batches, rank)


def test_last_rank_of_a_v_defers_weight_gradients_after_its_last_forward() -> None:
    points = SplitSchedule(V_SHAPED, 4, 3, 2, 16).points
    deferred = {sum(point.deferred) for point in points if point.kind is PassKind.forward}
    assert deferred == {0}
    assert max(sum(point.deferred) for point in points) == 2 * 3 + 1


def test_interleaved_rank_defers_weight_gradients_of_as_many_passes_as_ranks_before_it() -> None:
    for rank in range(4):
        points = SplitSchedule(INTERLEAVED, 4, rank, 2, 16).points
        running = [point for point in points if point.kind is PassKind.input_backward]
        assert max(sum(point.deferred) for point in running) == rank


def test_points_do_not_repeat_the_steady_state() -> None:
    short, long = (
        len(SplitSchedule(V_SHAPED, 8, 3, 2, micro_batches).points) for micro_batches in (32, 256)
    )
    assert short == long


def test_in_flight_passes_are_those_of_both_states() -> None:
    """As the paper: each rank of a V stores activations of as many passes as there are stages."""
    for rank in range(4):
        schedule = SplitSchedule(V_SHAPED, 4, rank, 2, 16)
        assert schedule.max_in_flight == 2 * 4


def test_input_backward_after_a_weight_backward_is_part_of_the_state() -> None:
    """FSDP adds the gradients of a weight backward to their sum in the next input backward."""
    points = SplitSchedule(INTERLEAVED, 2, 0, 1, 4).points
    states = {
        (point.finished[0] > 0, point.follows_weights[0], point.continues_backward[0])
        for point in points
        if point.kind is PassKind.weight_backward
    }
    assert states == {(False, False, False), (True, False, True)}


def test_weight_backward_after_another_is_no_input_backward() -> None:
    """The second rank runs weight backwards of two micro-batches one after another."""
    passes = SplitSchedule(INTERLEAVED, 2, 1, 2, 4).passes
    kinds = [it.kind for it in passes if it.stage == 1 and it.kind is not PassKind.forward]
    first_weights = kinds.index(PassKind.weight_backward)
    assert kinds[first_weights : first_weights + 2] == [PassKind.weight_backward] * 2
    before_sum = [
        point
        for point in SplitSchedule(INTERLEAVED, 2, 1, 2, 4).points
        if point.finished[1] == 2 and point.finished_inputs[1] == 2
    ]
    assert before_sum
    assert not any(point.continues_backward[1] for point in before_sum)
