"""What a search prints: what it goes on with, what it refused, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scalewise.console import get_console, print_lines
from scalewise.plain_console import styled_text
from scalewise.tracking.metric_names import METRICS
from scalewise.tracking.run_files import read_json
from scalewise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from scalewise.hpo.optuna_study import OptunaSearch

SHOWN = 12
"""Trials of a Pareto front that are shown."""


def print_search_start(optuna_search: OptunaSearch, reclaimed: Sequence[FrozenTrial]) -> None:
    """Prints what there is to do, and what an earlier sweep has left."""
    ended = len(optuna_search.finished_trials)
    if ended or reclaimed:
        print_lines(
            f"study {optuna_search.study.study_name}: {ended} of "
            f"{optuna_search.num_trials} trials are there"
        )
    for trial in reclaimed:
        print_lines(f"trial {trial.number} was under way when its sweep ended")


def print_rejected_trial(number: int, params: Mapping[str, object], reason: str) -> None:
    """Prints a trial that could not run."""
    print_lines("", f"trial {number} refused  {_point_text(params)}", f"  {reason}")


def print_search_result(record: Mapping[str, Any], folder: Path) -> None:
    """Prints how the trials ended, the best of them, and the line that trains each."""
    trials = {trial["number"]: trial for trial in record["trials"]}
    states = [trial["state"] for trial in trials.values()]
    counted = [f"{states.count(s)} {s}" for s in dict.fromkeys(states)]
    print_lines("", f"{record['study']}: {', '.join(counted)} of {record['wanted']} trials")
    best = [trials[number] for number in record["best"]]
    if not best:
        print_lines("no trial is to be recommended: none was finished within the constraints")
        return
    several = len(record["objectives"]) > 1
    title = f"best in one of {len(record['objectives'])} objectives" if several else "best"
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", *best[0]["params"], *record["objectives"]):
        shown.add_column(name, justify="right")
    for trial in best[:SHOWN]:
        params = [_value_text(value) for value in trial["params"].values()]
        values = map(_measured_text, record["objectives"], trial["values"])
        shown.add_row(str(trial["number"]), *params, *values)
    console = get_console()
    console.print(styled_text((title, "bold"), f", {SHOWN} shown" * (len(best) > SHOWN)))
    console.print(shown)
    for trial in best[:SHOWN]:
        command = read_json(folder / str(trial["folder"]) / "status.json").get("command")
        console.print(str(command), soft_wrap=True, style="cyan")
    for key, shares in record["importance"].items():
        said = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
        console.print(f"what decided {key}: {said}")


def _point_text(params: Mapping[str, object]) -> str:
    return "  ".join(f"{key}={_value_text(value)}" for key, value in params.items())


def _value_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _measured_text(key: str, value: float) -> str:
    unit = METRICS[key].unit
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
