"""How much longer steps take than a profile foresees, learnt from the runs that used it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

from scalewise import bounded_yaml, regular_files
from scalewise.bench import profile
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.launch.status import versions
from scalewise.tracking.run_files import read_json
from scalewise.typed_override import command_line, format_override, shell_word

LEAST = 3
"""Runs below which a spread says nothing."""


@dataclass(frozen=True)
class StepScale:
    """Measured over foreseen step times: their median and, over it, the 10th and 90th in 100."""

    median: float
    low: float
    high: float
    runs: int


def input_issues(folder: str, file: Path) -> Iterator[ConfigIssue]:
    """Yields what there is not: the folder of runs, or the profile that they used."""
    if not Path(folder).is_dir():
        yield ConfigIssue("learn", folder, "is no folder", "set learn=runs")
    if not file.exists():
        fix = f"{command_line('calibrate', [f'name={file.stem}'])}, then train with "
        fix += format_override("hardware", file.stem)
        yield ConfigIssue("name", file.stem, f"{file} is not there yet", fix)


def learn_step_scale(folder: Path, file: Path) -> StepScale:
    """Returns the scale of the profile ``file`` by the runs below ``folder``, and keeps it there.

    A run counts if it ended well on the profile's figures as they are now, under the same torch,
    and was measured. Raises ``ConfigError`` where fewer than ``LEAST`` do.
    """
    figures, torch = profile.measured_figures(file), versions().get("torch")
    found = [ratio for run in _iter_runs(folder) if (ratio := _step_ratio(run, figures, torch))]
    if len(found) < LEAST:
        reason = (
            f"{len(found)} runs below {folder} ended well on {file} under torch {torch} and have "
            f"a measured step; {LEAST} are needed"
        )
        fix = "scalewise train -cd " + shell_word(file.parents[1])
        fix += f" {format_override('hardware', file.stem)} ..."
        raise ConfigError.for_key("", "", reason, fix)
    deciles = quantiles(found, n=10, method="inclusive")
    middle = median(found)
    scale = StepScale(middle, deciles[0] / middle, deciles[-1] / middle, len(found))
    values = {
        "step_scale": scale.median,
        "step_shortest": scale.low,
        "step_longest": scale.high,
    }
    how = f"{profile.utc_date()} from {len(found)} runs with {profile.software_versions()}"
    profile.add_figures(file, values, f"Scale of steps learnt on {how}.")
    return scale


def _iter_runs(folder: Path) -> Iterator[Path]:
    yield from sorted(file.parent for file in folder.rglob("plan.json"))


def _step_ratio(run: Path, figures: Mapping[str, object], torch: str | None) -> float | None:
    """Returns measured over foreseen seconds, the scale of then taken out; None: no such run."""
    try:
        status, plan = read_json(run / "status.json"), read_json(run / "plan.json")
        metrics = _ratio_table(read_json(run / "summary.json").get("metrics"))
        resolved = bounded_yaml.load_yaml(regular_files.read_text(run / "resolved.yaml"))
        used = _ratio_table(_ratio_table(resolved).get("hardware"))
    except (OSError, ValueError, yaml.YAMLError):  # of a run that was cut off
        return None
    if status.get("status") != "ok" or _ratio_table(status.get("versions")).get("torch") != torch:
        return None
    if any(used.get(key) != value for key, value in figures.items()):
        return None
    took, predicted = metrics.get("time/step_s"), plan.get("plan/step_s")
    if not isinstance(took, float) or not isinstance(predicted, float):
        return None
    return took / predicted * float(used["step_scale"])


def _ratio_table(content: object) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}
