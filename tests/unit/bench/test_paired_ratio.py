"""Paired timing ratios: robust to drift, with a confidence interval."""

import random

import pytest

from scalewise.bench.paired_ratio import neighbor_excess, paired_ratio


def test_paired_ratio_is_robust_to_drift() -> None:
    hand = [1.0 + 0.01 * place for place in range(0, 82, 2)]
    suite = [1.02 * (1.0 + 0.01 * place) for place in range(1, 81, 2)]
    found = paired_ratio(suite, hand)
    assert found.pairs == 40
    assert (found.low, found.median, found.high) == pytest.approx((1.02, 1.02, 1.02))


@pytest.mark.parametrize("seed", range(5))
def test_paired_ratio_interval_is_robust_to_outliers(seed: int) -> None:
    draw = random.Random(seed)

    def times(count: int, mean: float) -> list[float]:
        noise = [draw.lognormvariate(0, 0.05) for _ in range(count)]
        return [mean * each * (3 if draw.random() < 0.1 else 1) for each in noise]

    found = paired_ratio(times(200, 1.05), times(201, 1.0))
    assert found.low < 1.06
    assert found.high > 1.02
    assert found.high - found.low < 0.06


def test_paired_ratio_of_few_pairs_is_their_range() -> None:
    found = paired_ratio([2.0, 3.0], [1.0, 1.0, 1.0])
    assert (found.low, found.high, found.pairs) == (2.0, 3.0, 2)


def test_paired_ratio_gives_the_extra_step_time() -> None:
    assert neighbor_excess([2.0, 5.0], [1.0, 2.0, 4.0]) == [0.5, 2.0]
