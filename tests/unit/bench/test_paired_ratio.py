"""Paired timing ratios: robust to drift, with a confidence interval."""

import random

import pytest

from scalewise.bench.paired_ratio import neighbor_excess, paired_ratio


def test_paired_ratio_is_robust_to_drift() -> None:
    baseline_times = [1.0 + 0.01 * index for index in range(0, 82, 2)]
    suite_times = [1.02 * (1.0 + 0.01 * index) for index in range(1, 81, 2)]
    ratio = paired_ratio(suite_times, baseline_times)
    assert ratio.pairs == 40
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.02, 1.02, 1.02))


@pytest.mark.parametrize("seed", range(5))
def test_paired_ratio_interval_is_robust_to_outliers(seed: int) -> None:
    rng = random.Random(seed)

    def times(count: int, mean: float) -> list[float]:
        noise = [rng.lognormvariate(0, 0.05) for _ in range(count)]
        return [mean * value * (3 if rng.random() < 0.1 else 1) for value in noise]

    ratio = paired_ratio(times(200, 1.05), times(201, 1.0))
    assert ratio.low < 1.06
    assert ratio.high > 1.02
    assert ratio.high - ratio.low < 0.06


def test_paired_ratio_of_few_pairs_is_their_range() -> None:
    ratio = paired_ratio([2.0, 3.0], [1.0, 1.0, 1.0])
    assert (ratio.low, ratio.high, ratio.pairs) == (2.0, 3.0, 2)


def test_paired_ratio_gives_the_extra_step_time() -> None:
    assert neighbor_excess([2.0, 5.0], [1.0, 2.0, 4.0]) == [0.5, 2.0]
