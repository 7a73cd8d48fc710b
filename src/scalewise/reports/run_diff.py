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

    what: str
    one: object
    other: object

    @property
    def ratio(self) -> float | None:
        """Returns the other's number over the one's."""
        if isinstance(self.one, int | float) and isinstance(self.other, int | float) and self.one:
            return self.other / self.one
        return None


def setting_pairs(one: RunRecord, other: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the settings that differ, options before fields."""
    ours = {change.key: change for change in one.changed}
    theirs = {change.key: change for change in other.changed}
    usual = {change.key: change.default for change in (*other.changed, *one.changed)}
    pairs = [
        ValuePair(key, *(held[key].value if key in held else default for held in (ours, theirs)))
        for key, default in usual.items()
    ]
    pairs = [pair for pair in pairs if pair.one != pair.other]
    return tuple(sorted(pairs, key=lambda pair: "." in pair.what))


def predicted_pairs(one: RunRecord, other: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the lines of the two ledgers at their peaks, what differs most first."""
    return _table_pairs(one.ledger, other.ledger)


def step_time_pairs(one: RunRecord, other: RunRecord) -> tuple[ValuePair, ...]:
    """Returns the parts of the two steps, in seconds, what differs most first."""
    return _table_pairs(one.step_parts, other.step_parts)


def _table_pairs(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[ValuePair, ...]:
    def apart(what: str) -> float:
        return abs(other.get(what, 0.0) - one.get(what, 0.0))

    names = sorted(dict.fromkeys((*one, *other)), key=apart, reverse=True)
    return tuple(ValuePair(name, one.get(name, 0.0), other.get(name, 0.0)) for name in names)


def measured_pairs(one: RunRecord, other: RunRecord) -> tuple[ValuePair, ...]:
    """Returns what was measured of either."""
    pairs = (ValuePair(key, _metric_pair(one, key), _metric_pair(other, key)) for key in MEASURED)
    return tuple(pair for pair in pairs if pair.one is not None or pair.other is not None)


def change_sentences(one: RunRecord, other: RunRecord) -> Iterator[str]:
    """Yields what became of peak and step, beside what was foreseen of them."""
    words = {PEAK: ("The peak is", "less", "more")}
    words[STEP] = ("A step takes", "less time", "more time")
    for key, (head, less, more) in words.items():
        came = ValuePair(key, _metric_pair(one, key), _metric_pair(other, key)).ratio
        said = ValuePair(
            key, _metric_pair(one, FORESEEN[key]), _metric_pair(other, FORESEEN[key])
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
