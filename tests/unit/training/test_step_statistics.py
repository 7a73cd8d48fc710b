"""Skipped loss spikes and clipping at a percentile, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalewise.training.step_statistics import (
    MAX_NORM,
    PercentileClipping,
    SpikeDetector,
    TrainingDiverged,
)

NAN, INF = float("nan"), float("inf")


def skipped_by_numpy(values: list[tuple[float, float]], sigma: float, window: int) -> list[bool]:
    """Whether each step is skipped, by the definition."""
    kept: list[tuple[float, float]] = []
    skipped = []
    for value in values:
        last = np.array(kept[-window:])
        is_spike = len(last) >= max(2, window // 2) and bool(
            (np.array(value) > last.mean(0) + sigma * last.std(0, ddof=1)).any()
        )
        skipped.append(is_spike)
        if not is_spike:
            kept.append(value)
    return skipped


@pytest.mark.parametrize("window", [2, 5, 40])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 3.0])
def test_spikes_equal_their_definition(sigma: float, window: int) -> None:
    generator = np.random.default_rng(1)
    values = [(float(loss), float(norm)) for loss, norm in generator.normal(3, 1, (200, 2))]
    detector = SpikeDetector(sigma, window, max_skipped=200)
    skipped = [detector.is_spike(step, *value) for step, value in enumerate(values)]
    assert skipped == skipped_by_numpy(values, sigma, window)
    assert detector.num_skipped == sum(skipped) > 0


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF)])
def test_step_that_is_not_finite_is_skipped_from_the_first(loss: float, norm: float) -> None:
    detector = SpikeDetector(6, 128, max_skipped=2)
    assert detector.is_spike(1, loss, norm)
    assert not detector.is_spike(2, 1.0, 1.0)


def test_infinite_norm_is_left_to_the_gradient_scaler() -> None:
    detector = SpikeDetector(6, 4, max_skipped=1, skips_infinite=False)
    assert not detector.is_spike(1, 1.0, INF)
    assert detector.state_dict()["values"] == []


def test_consecutive_skipped_steps_stop_the_run() -> None:
    detector = SpikeDetector(2, 4, max_skipped=3)
    for step, value in enumerate([1.1, 1.0, 1.1, 9.0, 9.0, 1.1, 9.0, 9.0], start=1):
        detector.is_spike(step, value, 1.0)
    message = r"step 9 is consecutive skipped step number 3: its loss is 9 \(limit 1\..*skip_sigma"
    with pytest.raises(TrainingDiverged, match=message):
        detector.is_spike(9, 9.0, 1.0)


def test_restored_spike_detector_continues_alike() -> None:
    values = np.random.default_rng(2).normal(3, 1, (60, 2)).tolist()
    detector, restored = (SpikeDetector(0.8, 10, max_skipped=60) for _ in range(2))
    for step, value in enumerate(values[:37]):
        detector.is_spike(step, *value)
    restored.load_state_dict(detector.state_dict())
    for step, value in enumerate(values[37:]):
        assert restored.is_spike(step, *value) == detector.is_spike(step, *value)
    assert restored.state_dict() == detector.state_dict()


@pytest.mark.parametrize("percentile", [10.0, 50.0, 90.0, 100.0])
def test_clipping_limit_equals_numpy(percentile: float) -> None:
    norms = np.random.default_rng(3).lognormal(size=50).astype(np.float32)
    clipping = PercentileClipping(percentile, 8, max_norm=1.5)
    for step, norm in enumerate(norms):
        limit = clipping.limit()
        if step < 8:
            assert limit == 1.5
        else:
            assert float(limit) == pytest.approx(
                float(np.percentile(norms[step - 8 : step], percentile)), rel=1e-6
            )
        clipping.add(torch.tensor(norm))


@pytest.mark.parametrize("steps", [3, 8, 13])
def test_restored_clipping_continues_alike(steps: int) -> None:
    norms = torch.rand(30, generator=torch.Generator().manual_seed(1))
    clipping, restored = (PercentileClipping(70, 8, max_norm=None) for _ in range(2))
    for norm in norms[:steps]:
        clipping.add(norm)
    restored.load_state_dict(clipping.state_dict())
    for norm in norms[steps:]:
        assert restored.limit() == clipping.limit()
        restored.add(norm)
        clipping.add(norm)


def test_smaller_window_keeps_the_last_norms() -> None:
    clipping, smaller = PercentileClipping(100, 8, None), PercentileClipping(100, 3, None)
    for norm in range(10, 0, -1):
        clipping.add(torch.tensor(float(norm)))
    smaller.load_state_dict(clipping.state_dict())
    assert smaller.limit() == 3


def test_norm_that_is_not_finite_counts_as_the_largest() -> None:
    clipping = PercentileClipping(50, 3, max_norm=None)
    for norm in (1.0, NAN, 2.0):
        clipping.add(torch.tensor(norm))
    assert clipping.limit() == 2
    assert sorted(clipping.state_dict()["norms"])[-1] == MAX_NORM
