"""Fits of power laws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from scalewise.power_law import fit_power_law

X = (1e5, 3e5, 1e6, 3e6, 1e7)


def test_exact_power_law_has_its_exponent() -> None:
    fit = fit_power_law(X, [7 * x**-0.08 for x in X])
    assert (fit.exponent, fit.low, fit.high) == pytest.approx((-0.08,) * 3)
    assert fit.text == "-0.080 (95% interval -0.080 to -0.080)"


def test_exponent_and_error_equal_least_squares_of_numpy() -> None:
    y = [3.1, 2.7, 2.5, 2.1, 2.0]
    (slope, _), covariance = np.polyfit(np.log(X), np.log(y), 1, cov=True)
    fit = fit_power_law(X, y)
    assert fit.exponent == pytest.approx(slope)
    assert fit.high - fit.exponent == pytest.approx(3.182 * math.sqrt(covariance[0, 0]))
    assert fit.exponent - fit.low == pytest.approx(fit.high - fit.exponent)


@pytest.mark.parametrize("count", [3, 5, 40])
def test_interval_contains_the_exponent_in_95_percent_of_fits(count: int) -> None:
    generator = random.Random(count)
    x = [10 ** (5 + 3 * index / count) for index in range(count)]
    fits = [
        fit_power_law(x, [5 * value**-0.1 * math.exp(generator.gauss(0, 0.02)) for value in x])
        for _ in range(2000)
    ]
    covered = sum(fit.low <= -0.1 <= fit.high for fit in fits) / len(fits)
    assert 0.935 <= covered <= 0.985


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ((1.0, 2.0), (1.0, 2.0), "at least 3"),
        ((2.0, 2.0, 2.0), (1.0, 2.0, 3.0), "constant"),
        ((1.0, 2.0, 0.0), (1.0, 2.0, 3.0), "domain|positive"),
    ],
)
def test_points_without_a_fit_are_rejected(
    x: tuple[float, ...], y: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        fit_power_law(x, y)
