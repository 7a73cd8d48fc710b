"""A hardware profile with figures that were measured, as a file of the group ``hardware``."""

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
from scalewise.parallelism.ring_cost import RingLink
from scalewise.tracking.run_files import write_text
from scalewise.units import GIGA, MICRO

MARK = "# Measured by `scalewise "
LEARNT = ("step_scale", "step_shortest", "step_longest")
LEARNT_MARK = "# Scale of steps learnt"
DEFAULTS = "defaults:\n  - /schema/hardware/device@_here_\n  - _self_\n\n"


def utc_date() -> str:
    """Returns the date, UTC."""
    return str(datetime.now(UTC).date())


def software_versions() -> str:
    """Returns what the figures depend on besides the machine."""
    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in ("scalewise", "torch") if name in found)


def link_entries(link: RingLink) -> dict[str, float]:
    """Returns a link's entries."""
    return {
        "link_gb_per_s": link.bytes_per_s / GIGA,
        "link_latency_us": max(link.latency_s / MICRO, 1e-3),
    }


def is_writable_profile(file: Path) -> bool:
    """Returns whether a profile may be written there: none is, or one that was measured."""
    return not file.exists() or file.read_text("utf-8").startswith(MARK)


def measured_figures(file: Path) -> dict[str, object]:
    """Returns the figures of a profile that was measured, but those learnt from runs."""
    held: dict[str, object] = bounded_yaml.load_yaml(file.read_text("utf-8"))
    return {key: value for key, value in held.items() if key not in ("defaults", *LEARNT)}


def add_figures(file: Path, values: Mapping[str, float], comment: str) -> None:
    """Puts figures that were learnt, and the comment ``comment``, in a profile that was
    measured."""
    head, _, _ = file.read_text("utf-8").partition(DEFAULTS)
    lines = [line for line in head.splitlines() if not line.startswith(LEARNT_MARK)]
    known = measured_figures(file) | {key: float(f"{value:.4g}") for key, value in values.items()}
    text = "".join(f"{line}\n" for line in (*lines, f"# {comment}")) + DEFAULTS
    write_text(file, text + yaml.safe_dump(known, sort_keys=False))


def write_profile(
    hardware: Hardware, figures: Mapping[str, float], comments: Sequence[str], file: Path
) -> Path:
    """Writes the known figures of ``hardware`` and, in their place, those measured.

    ``comments``: lines of a comment; the first begins with the verb that measured.
    """
    held = {entry.name: getattr(hardware, entry.name) for entry in fields(hardware)}
    known = {
        key: value.value if isinstance(value, Enum) else value
        for key, value in held.items()
        if value not in (None, "") and key not in (*LEARNT, "read_off")
    }
    known |= {key: float(f"{value:.4g}") for key, value in figures.items()}
    first, *rest = comments
    head = "".join((f"{MARK}{first}\n", *(f"# {line}\n" for line in rest), DEFAULTS))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, head + yaml.safe_dump(known, sort_keys=False))
    return file
