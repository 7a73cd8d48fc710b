"""What two runs were set otherwise, and what that did to what was foreseen and to what came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scalewise.reports.compare import FORESEEN, PEAK, STEP
from scalewise.reports.records import RunRecord
from scalewise.tracking.metric_names import METRICS

MEASURED = tuple(
    key
    for key in METRICS
    if key.startswith(("memory/", "time/"))
    or key in ("throughput/tokens_per_s", "train/loss", "val/loss")
)


@dataclass(frozen=True)
class ValuePair:
    """One thing of two runs; None: of one of them it is not known."""

    name: str
    first: object
    second: object

    @property
    def ratio(self) -> float | None:
        """Returns the other's number over the one's."""
        if (
            isinstance(self.first, int | float)
            and isinstance(self.second, int | float)
            and self.first
        ):
            return self.second / self.first
        return None


def setting_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the settings that differ, options before fields."""
    ours = {change.key: change for change in first.changed_settings}
    theirs = {change.key: change for change in second.changed_settings}
    usual = {
        change.key: change.default for change in (*second.changed_settings, *first.changed_settings)
    }
    pairs = [
        ValuePair(key, *(held[key].value if key in held else default for held in (ours, theirs)))
        for key, default in usual.items()
    ]
    pairs = [pair for pair in pairs if pair.first != pair.second]
    return tuple(sorted(pairs, key=lambda pair: "." in pair.name))


def predicted_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the lines of the two ledgers at their peaks, what differs most first."""
    return _table_pairs(first.memory_breakdown, second.memory_breakdown)


def step_time_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the parts of the two steps, in seconds, what differs most first."""
    return _table_pairs(first.step_parts, second.step_parts)


def _table_pairs(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[ValuePair, ...]:
    def apart(what: str) -> float:
        return abs(second.get(what, 0.0) - first.get(what, 0.0))

    names = sorted(dict.fromkeys((*first, *second)), key=apart, reverse=True)
    return tuple(ValuePair(name, first.get(name, 0.0), second.get(name, 0.0)) for name in names)


def measured_pairs(first: RunRecord, second: RunRecord) -> tuple[ValuePair, ...]:
    """Returns what was measured of either."""
    pairs = (
        ValuePair(key, _metric_pair(first, key), _metric_pair(second, key)) for key in MEASURED
    )
    return tuple(pair for pair in pairs if pair.first is not None or pair.second is not None)


def change_sentences(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yields what became of peak and step, beside what was foreseen of them."""
    words = {PEAK: ("The peak is", "less", "more")}
    words[STEP] = ("A step takes", "less time", "more time")
    for key, (head, less, more) in words.items():
        came = ValuePair(key, _metric_pair(first, key), _metric_pair(second, key)).ratio
        said = ValuePair(
            key, _metric_pair(first, FORESEEN[key]), _metric_pair(second, FORESEEN[key])
        ).ratio
        if came is None:
            continue
        text = f"{head} {_share_text(came, less, more)}"
        yield f"{text}; foreseen: {_share_text(said, less, more)}" if said is not None else text


def _share_text(ratio: float, less: str, more: str) -> str:
    change = ratio - 1
    return (
        "the same" if abs(change) < 0.005 else f"{abs(change):.0%} {less if change < 0 else more}"
    )


def _metric_pair(run: RunRecord, key: str) -> float | None:
    return None if run.summary is None else run.summary.metrics.get(key)
