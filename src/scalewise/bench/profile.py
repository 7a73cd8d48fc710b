"""Hardware profiles: measured values, and the scale of step times fitted to runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

from scalewise import bounded_yaml, regular_files
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import Hardware
from scalewise.launch.status_file import versions
from scalewise.parallelism.collective import RingLink
from scalewise.run_files import read_json, write_text
from scalewise.typed_override import command_line, format_override, shell_word
from scalewise.units import GIGA, MICRO

MARK = "# Measured by `scalewise "
STEP_SCALE_KEYS = ("step_scale", "step_shortest", "step_longest")
STEP_SCALE_COMMENT = "Step scale fitted"
"""Start of the comment on the step scale."""
DEFAULTS = "defaults:\n  - /schema/hardware/device@_here_\n  - _self_\n\n"
MIN_RUNS = 3
"""Minimum number of runs for a spread."""


def utc_date() -> str:
    """Current date in UTC."""
    return str(datetime.now(UTC).date())


def software_versions() -> str:
    """Versions of scalewise and torch, on which measured values depend."""
    installed = versions()
    names = (name for name in ("scalewise", "torch") if name in installed)
    return ", ".join(f"{name} {installed[name]}" for name in names)


def link_entries(link: RingLink) -> dict[str, float]:
    """Entries of a link in a profile."""
    return {
        "link_gb_per_s": link.bytes_per_s / GIGA,
        "link_latency_us": max(link.latency_s / MICRO, 1e-3),
    }


def is_writable_profile(file: Path) -> bool:
    """Whether a file does not exist or is a measured profile, which may be overwritten."""
    return not file.exists() or file.read_text("utf-8").startswith(MARK)


def measured_figures(file: Path) -> dict[str, object]:
    """Values of a measured profile without the step scale."""
    entries: dict[str, object] = bounded_yaml.load_yaml(file.read_text("utf-8"))
    excluded = ("defaults", *STEP_SCALE_KEYS)
    return {key: value for key, value in entries.items() if key not in excluded}


def add_figures(file: Path, values: Mapping[str, float], comment: str) -> None:
    """Set the step scale in a measured profile, with a comment on its origin."""
    head, _, _ = file.read_text("utf-8").partition(DEFAULTS)
    lines = [line for line in head.splitlines() if not line.startswith(f"# {STEP_SCALE_COMMENT}")]
    entries = measured_figures(file) | {key: float(f"{value:.4g}") for key, value in values.items()}
    text = "".join(f"{line}\n" for line in (*lines, f"# {comment}")) + DEFAULTS
    write_text(file, text + yaml.safe_dump(entries, sort_keys=False))


def write_profile(
    hardware: Hardware, figures: Mapping[str, float], comments: Sequence[str], file: Path
) -> Path:
    """Write a profile of the values of ``hardware``, replaced by measured ones where available.

    Args:
        hardware: Existing profile.
        figures: Measured values by key.
        comments: Comment lines; the first starts with the command that has measured the values.
        file: Path of the profile.
    """
    values = {field.name: getattr(hardware, field.name) for field in fields(hardware)}
    entries = {
        key: value.value if isinstance(value, Enum) else value
        for key, value in values.items()
        if value not in (None, "") and key not in (*STEP_SCALE_KEYS, "read_off")
    }
    entries |= {key: float(f"{value:.4g}") for key, value in figures.items()}
    first, *rest = comments
    head = "".join((f"{MARK}{first}\n", *(f"# {line}\n" for line in rest), DEFAULTS))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, head + yaml.safe_dump(entries, sort_keys=False))
    return file


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
    figures, torch = measured_figures(file), versions().get("torch")
    ratios = [ratio for run in _iter_runs(folder) if (ratio := _step_ratio(run, figures, torch))]
    if len(ratios) < MIN_RUNS:
        reason = (
            f"{len(ratios)} runs in {folder} have succeeded with {file} and torch {torch} and "
            f"have a measured step time; at least {MIN_RUNS} are required"
        )
        fix = "scalewise train -cd " + shell_word(file.parents[1])
        fix += f" {format_override('hardware', file.stem)} ..."
        raise ConfigError.for_key("", "", reason, fix)
    scale = fit_step_scale(ratios)
    values = {
        "step_scale": scale.median,
        "step_shortest": scale.low,
        "step_longest": scale.high,
    }
    provenance = f"{utc_date()} from {len(ratios)} runs with {software_versions()}"
    add_figures(file, values, f"{STEP_SCALE_COMMENT} on {provenance}.")
    return scale


def fit_step_scale(ratios: Sequence[float]) -> StepScale:
    """Step scale of ratios of measured to unscaled predicted step times."""
    deciles = quantiles(ratios, n=10, method="inclusive")
    center = median(ratios)
    return StepScale(center, deciles[0] / center, deciles[-1] / center, len(ratios))


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
