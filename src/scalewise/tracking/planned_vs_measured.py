"""What a run measured and how far off it was foreseen, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalewise.tracking.tables import PAIRS
from scalewise.units import format_bytes, format_seconds

_TOLD: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory/peak_bytes": ("peak", format_bytes),
    "time/step_s": ("step", format_seconds),
}


def comparison_text(metrics: Mapping[str, Any]) -> str:
    """Returns ``peak 36.9 MiB (foreseen -0.2%)`` and the step alike; empty where nothing was."""
    return "  ".join(
        f"{_TOLD[key][0]} {_TOLD[key][1](metrics[key])} "
        f"(foreseen {round(metrics[said] / metrics[key] - 1, 3) + 0.0:+.1%})"
        for said, key in PAIRS.items()
        if metrics.get(said) is not None and metrics.get(key)
    )
