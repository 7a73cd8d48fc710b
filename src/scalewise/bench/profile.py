"""Files of the config group ``hardware`` with measured values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import yaml

from scalewise import bounded_yaml
from scalewise.hardware import Hardware
from scalewise.launch.status import versions
from scalewise.parallelism.collective import RingLink
from scalewise.run_files import write_text
from scalewise.units import GIGA, MICRO

MARK = "# Measured by `scalewise "
STEP_SCALE_KEYS = ("step_scale", "step_shortest", "step_longest")
STEP_SCALE_COMMENT = "Step scale fitted"
"""Start of the comment on the step scale."""
DEFAULTS = "defaults:\n  - /schema/hardware/device@_here_\n  - _self_\n\n"


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
