"""``scalewise plan explain RUN OTHER``: differences in settings, predictions and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from scalewise.console import MISSING
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.plain_console import get_console, styled_text
from scalewise.planner.memory_breakdown import entry_title
from scalewise.planner.step_time import step_part_title
from scalewise.reports import records, run_diff
from scalewise.reports.records import RunRecord
from scalewise.reports.run_diff import ValuePair
from scalewise.units import format_bytes, format_seconds

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
        ("settings", run_diff.setting_pairs(one, other)),
        ("predicted peak memory", _notable_pairs(run_diff.predicted_pairs(one, other))),
        ("predicted step time", _notable_pairs(run_diff.step_time_pairs(one, other))),
        ("measured", run_diff.measured_pairs(one, other)),
    ):
        if pairs:
            console.print()
            console.print(_pairs_table(title, pairs, one, other))
    console.print()
    for sentence in run_diff.change_sentences(one, other):
        console.print(sentence)
    return 0


def _read_runs(arguments: Sequence[str]) -> list[RunRecord]:
    runs, issues = [], []
    for argument in arguments:
        run = records.read_run(Path(argument).expanduser())
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
