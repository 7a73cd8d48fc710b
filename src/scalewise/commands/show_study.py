"""Terminal output of a hyperparameter search: start, rejected trials and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scalewise.console import print_lines
from scalewise.metric_names import METRICS
from scalewise.plain_console import get_console, styled_text
from scalewise.run_files import read_json
from scalewise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from scalewise.hpo.optuna_study import OptunaSearch

MAX_TRIALS = 12
"""Maximum number of trials in the output."""


def print_search_start(optuna_search: OptunaSearch, reclaimed: Sequence[FrozenTrial]) -> None:
    """Print the number of remaining trials and the trials of an earlier sweep."""
    finished = len(optuna_search.finished_trials)
    if finished or reclaimed:
        print_lines(
            f"study {optuna_search.study.study_name}: {finished} of "
            f"{optuna_search.num_trials} trials are finished"
        )
    for trial in reclaimed:
        print_lines(f"trial {trial.number} was running when its sweep ended")


def print_rejected_trial(number: int, params: Mapping[str, object], reason: str) -> None:
    """Print a trial whose configuration is rejected."""
    print_lines("", f"trial {number} rejected  {_point_text(params)}", f"  {reason}")


def print_search_result(record: Mapping[str, Any], folder: Path) -> None:
    """Print the outcomes of the trials, the best trials and the command of each."""
    trials = {trial["number"]: trial for trial in record["trials"]}
    states = [trial["state"] for trial in trials.values()]
    state_counts = [f"{states.count(s)} {s}" for s in dict.fromkeys(states)]
    print_lines("", f"{record['study']}: {', '.join(state_counts)} of {record['wanted']} trials")
    best = [trials[number] for number in record["best"]]
    if not best:
        print_lines("no best trial: no trial finished within the constraints")
        return
    is_multi_objective = len(record["objectives"]) > 1
    title = (
        f"best in one of {len(record['objectives'])} objectives" if is_multi_objective else "best"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", *best[0]["params"], *record["objectives"]):
        table.add_column(name, justify="right")
    for trial in best[:MAX_TRIALS]:
        params = [_value_text(value) for value in trial["params"].values()]
        values = map(_measured_text, record["objectives"], trial["values"])
        table.add_row(str(trial["number"]), *params, *values)
    console = get_console()
    console.print(styled_text((title, "bold"), f", first {MAX_TRIALS}" * (len(best) > MAX_TRIALS)))
    console.print(table)
    for trial in best[:MAX_TRIALS]:
        command = read_json(folder / str(trial["folder"]) / "status.json").get("command")
        console.print(str(command), soft_wrap=True, style="cyan")
    for key, shares in record["importance"].items():
        importance = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
        console.print(f"importance for {key}: {importance}")


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
