"""One-line comparison of a run's measurements with their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalewise.tracking.tables import MEASURED_KEYS
from scalewise.units import format_bytes, format_seconds

_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory/peak_bytes": ("peak", format_bytes),
    "time/step_s": ("step", format_seconds),
}


def comparison_text(metrics: Mapping[str, Any]) -> str:
    """Format as ``peak 36.9 MiB (predicted -0.2%)  step ...``; empty without predictions."""
    return "  ".join(
        f"{_FORMATS[key][0]} {_FORMATS[key][1](metrics[key])} "
        f"(predicted {round(metrics[plan_key] / metrics[key] - 1, 3) + 0.0:+.1%})"
        for plan_key, key in MEASURED_KEYS.items()
        if metrics.get(plan_key) is not None and metrics.get(key)
    )
