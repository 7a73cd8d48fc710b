"""Confidence intervals of the mean of few values."""

from __future__ import annotations

import random

import pytest

from scalewise.confidence_interval import mean_interval

NUM_SAMPLES = 4_000


def test_interval_of_a_textbook_sample() -> None:
    """Mean 10, standard deviation 2, and t = 2.776 for 4 degrees of freedom."""
    interval = mean_interval([10 + 2 * value / 1.5811388 for value in (-2, -1, 0, 1, 2)])
    assert interval.mean == pytest.approx(10)
    assert interval.high - interval.mean == pytest.approx(2.776 * 2 / 5**0.5, rel=1e-3)
    assert interval.low == pytest.approx(20 - interval.high)


@pytest.mark.parametrize("num_values", [2, 3, 6])
def test_interval_contains_the_mean_in_95_percent_of_samples(num_values: int) -> None:
    generator = random.Random(num_values)
    intervals = [
        mean_interval([generator.gauss(3, 0.5) for _ in range(num_values)])
        for _ in range(NUM_SAMPLES)
    ]
    coverage = sum(interval.low <= 3 <= interval.high for interval in intervals) / NUM_SAMPLES
    assert coverage == pytest.approx(0.95, abs=0.0138)  # 4 standard deviations


def test_interval_of_one_value_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        mean_interval([1.0])
