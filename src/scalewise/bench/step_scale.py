"""Scale of a profile's predicted step times, fitted to the runs that used the profile."""

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
from scalewise.run_files import read_json
from scalewise.typed_override import command_line, format_override, shell_word

MIN_RUNS = 3
"""Minimum number of runs for a spread."""


@dataclass(frozen=True)
class StepScale:
    """Ratio of measured to predicted step times."""

    median: float
    """Median of the ratios."""
    low: float
    """10th percentile, relative to the median."""
    high: float
    """90th percentile, relative to the median."""
    runs: int
    """Number of runs."""


def input_issues(folder: str, file: Path) -> Iterator[ConfigIssue]:
    """Issues of a missing folder of runs, or a missing profile."""
    if not Path(folder).is_dir():
        yield ConfigIssue("learn", folder, "is not a folder", "set learn=runs")
    if not file.exists():
        fix = f"{command_line('calibrate', [f'name={file.stem}'])}, then train with "
        fix += format_override("hardware", file.stem)
        yield ConfigIssue("name", file.stem, f"{file} does not exist", fix)


def learn_step_scale(folder: Path, file: Path) -> StepScale:
    """Fit the step scale of a profile to the runs in a folder, and add it to the profile.

    A run counts if it has succeeded with the current values of the profile and the same version of
    torch, and has a measured step time.

    Raises:
        ConfigError: there are fewer than ``MIN_RUNS`` such runs.
    """
    figures, torch = profile.measured_figures(file), versions().get("torch")
    ratios = [ratio for run in _iter_runs(folder) if (ratio := _step_ratio(run, figures, torch))]
    if len(ratios) < MIN_RUNS:
        reason = (
            f"{len(ratios)} runs in {folder} have succeeded with {file} and torch {torch} and "
            f"have a measured step time; at least {MIN_RUNS} are required"
        )
        fix = "scalewise train -cd " + shell_word(file.parents[1])
        fix += f" {format_override('hardware', file.stem)} ..."
        raise ConfigError.for_key("", "", reason, fix)
    deciles = quantiles(ratios, n=10, method="inclusive")
    center = median(ratios)
    scale = StepScale(center, deciles[0] / center, deciles[-1] / center, len(ratios))
    values = {
        "step_scale": scale.median,
        "step_shortest": scale.low,
        "step_longest": scale.high,
    }
    provenance = f"{profile.utc_date()} from {len(ratios)} runs with {profile.software_versions()}"
    profile.add_figures(file, values, f"{profile.STEP_SCALE_COMMENT} on {provenance}.")
    return scale


def _iter_runs(folder: Path) -> Iterator[Path]:
    yield from sorted(file.parent for file in folder.rglob("plan.json"))


def _step_ratio(run: Path, figures: Mapping[str, object], torch: str | None) -> float | None:
    """Ratio of measured to unscaled predicted step time; None: the run does not count."""
    try:
        status, plan = read_json(run / "status.json"), read_json(run / "plan.json")
        metrics = _as_mapping(read_json(run / "summary.json").get("metrics"))
        resolved = bounded_yaml.load_yaml(regular_files.read_text(run / "resolved.yaml"))
        hardware = _as_mapping(_as_mapping(resolved).get("hardware"))
    except (OSError, ValueError, yaml.YAMLError):  # incomplete files of a killed run
        return None
    if status.get("status") != "ok" or _as_mapping(status.get("versions")).get("torch") != torch:
        return None
    if any(hardware.get(key) != value for key, value in figures.items()):
        return None
    measured, predicted = metrics.get("time/step_s"), plan.get("plan/step_s")
    if not isinstance(measured, float) or not isinstance(predicted, float):
        return None
    return measured / predicted * float(hardware["step_scale"])


def _as_mapping(content: object) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}
