"""Differences of two runs: settings, predictions and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scalewise.metric_names import METRICS
from scalewise.reports.compare import PEAK, PREDICTED_KEYS, STEP
from scalewise.reports.records import RunRecord

MEASURED = tuple(
    key
    for key in METRICS
    if key.startswith(("memory/", "time/"))
    or key in ("throughput/tokens_per_s", "train/loss", "val/loss")
)


@dataclass(frozen=True)
class ValuePair:
    """A value of two runs."""

    name: str
    """Name of the value."""
    first: object
    """Value of the first run; ``None`` if unknown."""
    second: object
    """Value of the second run; ``None`` if unknown."""

    @property
    def ratio(self) -> float | None:
        """Second value divided by the first; ``None`` if either is not a number."""
        if (
            isinstance(self.first, int | float)
            and isinstance(self.second, int | float)
            and self.first
        ):
            return self.second / self.first
        return None


def setting_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Settings that differ, options before fields."""
    first_changes = {change.key: change for change in first.changed_settings}
    second_changes = {change.key: change for change in second.changed_settings}
    defaults = {
        change.key: change.default for change in (*second.changed_settings, *first.changed_settings)
    }
    pairs = [
        ValuePair(
            key,
            *(
                changes[key].value if key in changes else default
                for changes in (first_changes, second_changes)
            ),
        )
        for key, default in defaults.items()
    ]
    pairs = [pair for pair in pairs if pair.first != pair.second]
    return tuple(sorted(pairs, key=lambda pair: "." in pair.name))


def predicted_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Entries of the predicted memory breakdowns at the peak, largest difference first."""
    return _table_pairs(first.memory_breakdown, second.memory_breakdown)


def step_time_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Predicted parts of the step time in seconds, largest difference first."""
    return _table_pairs(first.step_parts, second.step_parts)


def _table_pairs(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[ValuePair, ...]:
    def difference(name: str) -> float:
        return abs(second.get(name, 0.0) - first.get(name, 0.0))

    names = sorted(dict.fromkeys((*first, *second)), key=difference, reverse=True)
    return tuple(ValuePair(name, first.get(name, 0.0), second.get(name, 0.0)) for name in names)


def measured_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Metrics that at least one of the runs measured."""
    pairs = (ValuePair(key, _metric(first, key), _metric(second, key)) for key in MEASURED)
    return tuple(pair for pair in pairs if pair.first is not None or pair.second is not None)


def change_sentences(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yield a sentence on the change of peak memory and step time, measured and predicted."""
    words = {PEAK: ("Peak memory is", "lower", "higher"), STEP: ("Step time is", "lower", "higher")}
    for key, (head, less, more) in words.items():
        measured = ValuePair(key, _metric(first, key), _metric(second, key)).ratio
        predicted = ValuePair(
            key, _metric(first, PREDICTED_KEYS[key]), _metric(second, PREDICTED_KEYS[key])
        ).ratio
        if measured is None:
            continue
        text = f"{head} {_change_text(measured, less, more)}"
        if predicted is not None:
            text += f"; predicted: {_change_text(predicted, less, more)}"
        yield text


def _change_text(ratio: float, less: str, more: str) -> str:
    change = ratio - 1
    return (
        "unchanged" if abs(change) < 0.005 else f"{abs(change):.0%} {less if change < 0 else more}"
    )


def _metric(run: RunRecord, key: str) -> float | None:
    return None if run.summary is None else run.summary.metrics.get(key)
