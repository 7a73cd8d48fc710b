"""``scalewise plan explain ONE OTHER``: two runs' settings, beside what they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from scalewise.console import MISSING, get_console
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.plain_console import styled_text
from scalewise.reports import records, run_diff
from scalewise.reports.records import RunRecord
from scalewise.reports.run_diff import ValuePair
from scalewise.units import format_bytes, format_seconds

SMALL_SHARE = 0.005
"""Lines that differ by less than this share of the largest are left out."""


def main(arguments: Sequence[str]) -> int:
    """Prints the difference of two runs' folders; exit code 0."""
    if len(arguments) != 2:
        fix = "scalewise plan explain runs/NAME/TIME runs/NAME/TIME"
        raise ConfigError.for_key("", "", f"two runs are compared, not {len(arguments)}", fix)
    one, other = _read_runs(arguments)
    console = get_console()
    for run in (one, other):
        console.print(styled_text(f"{run.folder}  ", (run.command, "dim")), soft_wrap=True)
    for title, pairs in (
        ("set", run_diff.setting_pairs(one, other)),
        ("foreseen at the peak", _notable_pairs(run_diff.predicted_pairs(one, other))),
        ("foreseen of a step", _notable_pairs(run_diff.step_time_pairs(one, other))),
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
    found, issues = [], []
    for argument in arguments:
        run = records.read_run(Path(argument).expanduser())
        if run is None:
            reason = f"{argument} is no folder of a run: it has no readable status.json"
            fix = "give the folder of a run, or put a copy of the file back"
            issues.append(ConfigIssue("", "", reason, fix))
        else:
            found.append(run)
    if issues:
        raise ConfigError(issues)
    return found


def _notable_pairs(pairs: Sequence[ValuePair]) -> list[ValuePair]:
    """Returns the pairs that differ by enough to be seen."""
    apart = [abs(_format_number(pair.second) - _format_number(pair.first)) for pair in pairs]
    most = max(
        (max(_format_number(pair.first), _format_number(pair.second)) for pair in pairs),
        default=0.0,
    )
    return [pair for pair, size in zip(pairs, apart, strict=True) if size > SMALL_SHARE * most]


def _format_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _pairs_table(title: str, pairs: Iterable[ValuePair], one: RunRecord, other: RunRecord) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column(title)
    for name in (one.folder, other.folder, ""):
        shown.add_column(name, justify="right")
    for pair in pairs:
        ratio = "" if title == "set" or pair.ratio is None else f"{pair.ratio - 1:+.0%}"
        shown.add_row(
            pair.name,
            _value_text(title, pair.name, pair.first),
            _value_text(title, pair.name, pair.second),
            ratio,
        )
    return shown


def _value_text(title: str, what: str, value: object) -> str:
    if value is None:
        return MISSING
    if not isinstance(value, int | float) or title == "set":
        return str(value)
    if what.endswith("_bytes") or title == "foreseen at the peak":
        return format_bytes(value)
    if (what.endswith("_s") and "_per_s" not in what) or title == "foreseen of a step":
        return format_seconds(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
