"""Entry of a case that compares interleaved times with those of a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from scalewise.bench.paired_ratio import paired_ratio
from scalewise.bench.suite import Entry

SELF_CHECK = (0.97, 1.03)
"""Range of the ratio of the baseline to itself; outside of it the machine is too noisy."""


def ratio_entry(
    times: Sequence[float],
    baseline_times: Sequence[float],
    self_check: float,
    baseline: str,
    **details: object,
) -> Entry:
    """Ratio of interleaved times with a 95 % interval, and that of the baseline to itself.

    The status is ``noisy`` if the baseline differs from itself.

    Args:
        times: Measured times, in seconds.
        baseline_times: Times of the baseline, one more than ``times``.
        self_check: Median ratio of the baseline to itself.
        baseline: Name of the baseline.
        **details: Other figures of the entry.
    """
    ratio = paired_ratio(times, baseline_times)
    return {
        **figure(ratio.median, ratio.low, ratio.high, f"of {baseline}"),
        **self_check_result(self_check),
        "pairs": ratio.pairs,
        "measured_s": median(times),
        "baseline_s": median(baseline_times),
        **details,
    }


def self_check_result(ratio: float) -> Entry:
    """Self-check of an entry, with the status ``noisy`` if the baseline differs from itself."""
    low, high = SELF_CHECK
    if low <= ratio <= high:
        return {"self_check": ratio}
    reason = f"the baseline takes {ratio:.3f} of itself, not {low} to {high}"
    return {"status": "noisy", "reason": reason, "self_check": ratio}


def compare_in_turn(
    pairs: int,
    baseline: Callable[[], float],
    measured: Callable[[], float],
    name: str,
    **details: object,
) -> Entry:
    """Ratio of two measurements that take turns; the baseline is measured twice in each.

    Args:
        pairs: Number of turns.
        baseline: Function that returns a time of the baseline, in seconds.
        measured: Function that returns a time to compare, in seconds.
        name: Name of the baseline.
        **details: Other figures of the entry.
    """
    baseline_s, second_s, measured_s = [baseline()], [], []
    for _ in range(pairs):
        measured_s.append(measured())
        second_s.append(baseline())
        baseline_s.append(baseline())
    self_check = paired_ratio(second_s, baseline_s).median
    return ratio_entry(measured_s, baseline_s, self_check, name, **details)


def figure(value: float, low: float, high: float, unit: str) -> Entry:
    """Figure of an entry with its interval.

    Args:
        value: Figure.
        low: Lower bound of the 95 % interval.
        high: Upper bound of the interval.
        unit: Unit, or ``of BASELINE`` for a ratio.
    """
    return {"figure": value, "low": low, "high": high, "unit": unit}


@dataclass(frozen=True)
class MeasuredCase:
    """Base of cases with one figure and its interval."""

    name: str
    """Name in records, ``GROUP/CASE``."""
    seconds: float
    """Estimated duration on two idle cores, in seconds."""
    overrides: tuple[str, ...]
    """Overrides of the measured run."""

    def describe(self, entry: Entry) -> str:
        """Figure, interval and self-check of an entry in one line."""
        text = f"{entry['figure']:.4g} ({entry['low']:.4g} to {entry['high']:.4g}) {entry['unit']}"
        check = entry.get("self_check")
        return text if check is None else f"{text}; self-check {check:.3f}"
