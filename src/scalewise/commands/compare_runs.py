"""``scalewise plan explain RUN OTHER``: differences in settings, predictions and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from scalewise import regular_files
from scalewise.console import MISSING
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.metric_names import METRICS
from scalewise.plain_console import get_console, styled_text
from scalewise.planner.memory_breakdown import entry_title
from scalewise.planner.step_parts import step_part_title
from scalewise.reports import records
from scalewise.reports.compare import PEAK, PREDICTED_KEYS, STEP
from scalewise.reports.records import RunRecord
from scalewise.units import format_bytes, format_seconds

MEASURED = tuple(
    key
    for key in METRICS
    if key.startswith(("memory/", "time/"))
    or key in ("throughput/tokens_per_s", "train/loss", "val/loss")
)
"""Keys of the compared metrics."""
SMALL_SHARE = 0.005
"""Entries that differ by less than this fraction of the largest entry are omitted."""
NAME_TITLES = {"predicted peak memory": entry_title, "predicted step time": step_part_title}
"""Function that returns the title of a row, by table title."""


def main(arguments: Sequence[str]) -> int:
    """Print the differences of two run folders; exit code 0."""
    if len(arguments) != 2:
        fix = "scalewise plan explain runs/NAME/TIME runs/NAME/TIME"
        raise ConfigError.for_key("", "", f"requires two run folders, not {len(arguments)}", fix)
    one, other = _read_runs(arguments)
    console = get_console()
    for run in (one, other):
        console.print(styled_text(f"{run.folder}  ", (run.command, "dim")), soft_wrap=True)
    for title, pairs in (
        ("settings", setting_pairs(one, other)),
        ("predicted peak memory", _notable_pairs(predicted_pairs(one, other))),
        ("predicted step time", _notable_pairs(step_time_pairs(one, other))),
        ("measured", measured_pairs(one, other)),
    ):
        if pairs:
            console.print()
            console.print(_pairs_table(title, pairs, one, other))
    console.print()
    for sentence in change_sentences(one, other):
        console.print(sentence)
    return 0


def _read_runs(arguments: Sequence[str]) -> list[RunRecord]:
    runs, issues = [], []
    for argument in arguments:
        run = records.read_run(regular_files.expand_home(argument))
        if run is None:
            reason = f"{argument} is not a run folder: it has no readable status.json"
            fix = "name a run folder, or restore the file from a copy"
            issues.append(ConfigIssue("", "", reason, fix))
        else:
            runs.append(run)
    if issues:
        raise ConfigError(issues)
    return runs


def _notable_pairs(pairs: Sequence[ValuePair]) -> list[ValuePair]:
    """Pairs that differ by more than ``SMALL_SHARE``."""
    differences = [abs(_format_number(pair.second) - _format_number(pair.first)) for pair in pairs]
    largest = max(
        (max(_format_number(pair.first), _format_number(pair.second)) for pair in pairs),
        default=0.0,
    )
    return [
        pair for pair, size in zip(pairs, differences, strict=True) if size > SMALL_SHARE * largest
    ]


def _format_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _pairs_table(title: str, pairs: Iterable[ValuePair], one: RunRecord, other: RunRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title)
    for name in (one.folder, other.folder, ""):
        table.add_column(name, justify="right")
    for pair in pairs:
        ratio = "" if title == "settings" or pair.ratio is None else f"{pair.ratio - 1:+.0%}"
        table.add_row(
            NAME_TITLES.get(title, str)(pair.name),
            _value_text(title, pair.name, pair.first),
            _value_text(title, pair.name, pair.second),
            ratio,
        )
    return table


def _value_text(title: str, name: str, value: object) -> str:
    if value is None:
        return MISSING
    if not isinstance(value, int | float) or title == "settings":
        return str(value)
    if name.endswith("_bytes") or title == "predicted peak memory":
        return format_bytes(value)
    if (name.endswith("_s") and "_per_s" not in name) or title == "predicted step time":
        return format_seconds(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


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
