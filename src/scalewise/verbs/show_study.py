"""What a search prints: what it goes on with, what it refused, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from scalewise import output
from scalewise.output import print_lines
from scalewise.plain_console import styled
from scalewise.tracking.files import read_json
from scalewise.tracking.names import METRICS
from scalewise.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from scalewise.study.study import Study

SHOWN = 12
"""Trials of a Pareto front that are shown."""


def begins(study: Study, reclaimed: Sequence[FrozenTrial]) -> None:
    """Prints what there is to do, and what an earlier sweep has left."""
    ended = len(study.ended)
    if ended or reclaimed:
        print_lines(f"study {study.optuna.study_name}: {ended} of {study.wanted} trials are there")
    for trial in reclaimed:
        print_lines(f"trial {trial.number} was under way when its sweep ended")


def refused(number: int, params: Mapping[str, object], reason: str) -> None:
    """Prints a trial that could not run."""
    print_lines("", f"trial {number} refused  {_point(params)}", f"  {reason}")


def ended(record: Mapping[str, Any], folder: Path) -> None:
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
        params = [_value(value) for value in trial["params"].values()]
        values = map(_measured, record["objectives"], trial["values"])
        shown.add_row(str(trial["number"]), *params, *values)
    console = output.console()
    console.print(styled((title, "bold"), f", {SHOWN} shown" * (len(best) > SHOWN)))
    console.print(shown)
    for trial in best[:SHOWN]:
        command = read_json(folder / str(trial["folder"]) / "status.json").get("command")
        console.print(str(command), soft_wrap=True, style="cyan")
    for key, shares in record["importance"].items():
        said = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
        console.print(f"what decided {key}: {said}")


def _point(params: Mapping[str, object]) -> str:
    return "  ".join(f"{key}={_value(value)}" for key, value in params.items())


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _measured(key: str, value: float) -> str:
    unit = METRICS[key].unit
    if unit == "B":
        return bytes_text(value)
    if unit == "s":
        return seconds_text(value)
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
