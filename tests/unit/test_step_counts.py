"""Counts of samples or micro-batches per step, compared with a list of every step."""

from itertools import accumulate

import pytest

from scalewise.step_counts import StepCounts

STEPS = 20
CASES = {
    "constant": (StepCounts(3), [3] * STEPS),
    "two_stages": (StepCounts(7, ((2, 1), (5, 4))), [1] * 2 + [4] * 3 + [7] * (STEPS - 5)),
    "one_step": (StepCounts(6, ((1, 2),)), [2] + [6] * (STEPS - 1)),
}


@pytest.mark.parametrize(("counts", "per_step"), CASES.values(), ids=CASES)
def test_counts_equal_a_list_of_steps(counts: StepCounts, per_step: list[int]) -> None:
    starts = [0, *accumulate(per_step)]
    assert [counts.at(step) for step in range(STEPS)] == per_step
    assert [counts.before(step) for step in range(STEPS + 1)] == starts
    positions = [(step, offset) for step, n in enumerate(per_step) for offset in range(n)]
    for position, expected in enumerate(positions):
        assert counts.locate(position) == expected, position
        assert counts.is_step_end(position) == (position in starts), position
    for total in range(1, starts[-1] + 1):
        expected_steps = next(step for step, start in enumerate(starts) if start >= total)
        assert counts.steps_for(total) == expected_steps, total
        assert counts.steps_for(total - 0.5) == expected_steps, total


@pytest.mark.parametrize(("counts", "per_step"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("steps", [0, 1, 3, 5, STEPS])
def test_stages_of_a_run_cover_its_steps(
    counts: StepCounts, per_step: list[int], steps: int
) -> None:
    stages = [*counts.iter_stages(steps)]
    covered = [count for _, length, count in stages for _ in range(length)]
    assert covered == per_step[:steps]
    assert [start for start, _, _ in stages] == [
        step for step in range(steps) if step == 0 or per_step[step] != per_step[step - 1]
    ]


def test_counts_are_converted_to_another_unit() -> None:
    assert StepCounts(8, ((3, 4),)).convert(lambda samples: samples // 4) == StepCounts(
        2, ((3, 1),)
    )


def test_product_has_the_stages_of_both_counts() -> None:
    for first, first_steps in CASES.values():
        for second, second_steps in CASES.values():
            product = first.multiply(second)
            expected = [a * b for a, b in zip(first_steps, second_steps, strict=True)]
            assert [product.at(step) for step in range(STEPS)] == expected
            assert product.before(STEPS) == sum(expected)
