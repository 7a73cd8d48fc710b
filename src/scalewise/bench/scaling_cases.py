"""Cases of scaling: exponent of the step time over depth, width, sequence length and ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any

from scalewise.bench import parallel
from scalewise.bench.comparison import MeasuredCase, figure, self_check_result
from scalewise.bench.interleaved import measure_steps
from scalewise.bench.paired_ratio import paired_ratio
from scalewise.bench.suite import Entry
from scalewise.launch import signals
from scalewise.registry import with_fields
from scalewise.run_config import RunConfig
from scalewise.training.device_setup import RankInfo

HEAD_WIDTH = 64
RESAMPLES = 1000
"""Number of bootstrap samples of an interval."""


@dataclass(frozen=True)
class Exponent:
    """Slope of log time over log size, with a 95 % interval."""

    value: float
    """Slope of the medians."""
    low: float
    """Lower bound of the interval."""
    high: float
    """Upper bound of the interval."""


def fit_exponent(times: Mapping[int, Sequence[float]]) -> Exponent:
    """Exponent of a power law that is fitted to the median times, with a bootstrap interval.

    Args:
        times: Times of at least two sizes, in seconds.
    """
    generator = random.Random(0)  # noqa: S311 (resampling)
    resampled = [
        _slope({size: generator.choices(values, k=len(values)) for size, values in times.items()})
        for _ in range(RESAMPLES)
    ]
    low, *_, high = quantiles(resampled, n=40)
    return Exponent(_slope(times), low, high)


def _slope(times: Mapping[int, Sequence[float]]) -> float:
    sizes = [log(size) for size in times]
    return linear_regression(sizes, [log(median(values)) for values in times.values()]).slope


def _with_depth(run: RunConfig, size: int) -> RunConfig:
    return replace(run, model=with_fields(run.model, layers=size))


def _with_width(run: RunConfig, size: int) -> RunConfig:
    sizes = {"width": size, "heads": size // HEAD_WIDTH, "feedforward": 3 * size}
    return replace(run, model=with_fields(run.model, **sizes))


def _with_sequence(run: RunConfig, size: int) -> RunConfig:
    model = with_fields(run.model, context=size)
    return replace(run, data=with_fields(run.data, sequence=size), model=model)


def _with_ranks(run: RunConfig, size: int) -> RunConfig:
    return replace(run, parallelism=with_fields(run.parallelism, replicas=size))


AXES: Mapping[str, Callable[[RunConfig, int], RunConfig]] = {
    "depth": _with_depth,
    "width": _with_width,
    "sequence": _with_sequence,
    "ranks": _with_ranks,
}
"""Function that sets the size of a run, by axis."""


@dataclass(frozen=True)
class ScalingCase(MeasuredCase):
    """Exponent of the step time over one size of a run, next to that of a hand-written loop."""

    axis: str
    """Key of ``AXES``."""
    sizes: tuple[int, ...]
    """Sizes, in ascending order."""
    pairs: int
    """Number of measured steps of each size in each of two passes."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Train each size in ascending and in descending order; return the fitted exponent."""
        folder.mkdir(parents=True)
        loops: dict[str, dict[int, list[float]]] = {"suite": {}, "hand": {}}
        checks = []
        runs = {size: AXES[self.axis](run, size) for size in self.sizes}
        for size in (*self.sizes, *reversed(self.sizes)):
            wall = self._step_times(runs[size], folder)["wall"]
            for name, times in loops.items():
                times.setdefault(size, []).extend(wall[name])
            checks.append(paired_ratio(wall["twin"], wall["hand"]).median)
        exponent, hand = (fit_exponent(loops[name]) for name in ("suite", "hand"))
        flops = {size: [sized_run.flops_per_step] for size, sized_run in runs.items()}
        return {
            **figure(exponent.value, exponent.low, exponent.high, f"exponent of {self.axis}"),
            **self_check_result(median(checks)),
            "baseline_figure": hand.value,
            "flops_exponent": _slope(flops),
            "step_s": {size: median(times) for size, times in loops["suite"].items()},
        }

    def _step_times(self, run: RunConfig, folder: Path) -> dict[str, Any]:
        if self.axis == "ranks":
            return parallel.measure_ranks(run, folder, self.pairs)
        with signals.restore_handlers():
            return measure_steps(run, folder, RankInfo(0, 0, 1), self.pairs)

    def describe(self, entry: Entry) -> str:
        """Exponents of scalewise, of the hand-written loop and of the FLOPs."""
        return (
            f"{super().describe(entry)}; hand-written loop {entry['baseline_figure']:.3f}, "
            f"FLOPs {entry['flops_exponent']:.3f}"
        )
