"""Metrics and tables of a run, for W&B and the terminal: predicted, measured and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalewise.metric_names import METRICS, SOURCE_LOSS
from scalewise.units import format_bytes, format_seconds

MEASURED_KEYS = {"plan/peak_bytes": "memory/peak_bytes", "plan/step_s": "time/step_s"}
"""Key of the measured metric by key of the predicted one."""
_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory/peak_bytes": ("peak", format_bytes),
    "time/step_s": ("step", format_seconds),
}

Row = dict[str, Any]
"""Metrics by key."""


@dataclass(frozen=True)
class TextTable:
    """A table.

    Attributes:
        columns: Column names.
        rows: One tuple per row.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]


def predicted_tables(plan: Mapping[str, Any]) -> dict[str, TextTable]:
    """Tables of a ``plan.json`` by key, in bytes of the worst device and seconds."""
    rows = [
        (c["kind"], " ".join(c["axes"]), c["what"], c["bytes"], c["count"], c["bytes"] * c["count"])
        for c in plan.get("collectives", [])
    ]
    columns = ("kind", "axes", "what", "bytes", "count", "bytes_per_step")
    tables = {
        "plan/ledger": TextTable(("entry", "bytes_at_peak"), _mapping_rows(plan, "ledger")),
        "plan/phases": TextTable(("phase", "bytes"), _mapping_rows(plan, "phases")),
        "plan/step_parts": TextTable(("part", "seconds"), _mapping_rows(plan, "step_parts")),
        "plan/collectives": TextTable(columns, rows),
    }
    return {key: table for key, table in tables.items() if table.rows}


def measured_table(plan: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, TextTable]:
    """Tables of measured memory and of predicted vs. measured values.

    Args:
        plan: Content of ``plan.json``.
        metrics: ``metrics`` of ``summary.json``.
    """
    memory = [
        (key.removeprefix("memory/").removesuffix("_bytes"), metrics[key])
        for key in METRICS
        if key.startswith("memory/") and metrics.get(key) is not None
    ]
    tables = {
        "memory/measured": TextTable(("part", "bytes"), memory),
        "plan/against_measured": TextTable(
            ("metric", "unit", "predicted", "measured", "predicted_over_measured"),
            list(_comparison_rows(plan, metrics)),
        ),
    }
    return {key: table for key, table in tables.items() if table.rows}


def _mapping_rows(plan: Mapping[str, Any], key: str) -> list[tuple[object, ...]]:
    return [(name, value) for name, value in plan.get(key, {}).items() if value is not None]


def _comparison_rows(
    plan: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Iterator[tuple[object, ...]]:
    for plan_key, key in MEASURED_KEYS.items():
        predicted, measured = plan.get(plan_key), metrics.get(key)
        if predicted is not None and measured:
            ratio = predicted / measured
            yield key, METRICS[key].unit, float(predicted), float(measured), ratio


def define_metrics(run: Any) -> None:
    """Set the optimizer step as x-axis of all metrics, and the minimum as summary of losses."""
    run.define_metric("step")
    for key in METRICS:
        if key != "step":
            summary = "min" if key.endswith("/loss") else "last"
            run.define_metric(key, step_metric="step", summary=summary)
    run.define_metric(f"{SOURCE_LOSS}*", step_metric="step", summary="min")


def average_window(rows: Sequence[Row]) -> Row:
    """Reduce a window of steps to one row: the mean of per-step metrics, else the last value.

    Metrics of a user-defined module are included.
    """
    averages: Row = {}
    for key in dict.fromkeys([*METRICS, *(key for row in rows for key in row)]):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            mean = key.startswith(("train/loss", "train/grad", "throughput/", "time/"))
            averages[key] = sum(values) / len(values) if mean else values[-1]
    return averages


def summary_metrics(summary: Mapping[str, Any]) -> Row:
    """Values of a ``summary.json`` by W&B key."""
    other = {key: value for key, value in summary.items() if key not in ("metrics", "notes")}
    return {f"final/{key}": value for key, value in {**summary["metrics"], **other}.items()}


def predicted_metrics(plan: Mapping[str, Any]) -> Row:
    """Values of a ``plan.json`` by W&B key."""
    return {key: value for key, value in plan.items() if key.startswith("plan/")}


def comparison_text(metrics: Mapping[str, Any]) -> str:
    """Format as ``peak 36.9 MiB (predicted -0.2%)  step ...``; empty without predictions."""
    return "  ".join(
        f"{_FORMATS[key][0]} {_FORMATS[key][1](metrics[key])} "
        f"(predicted {round(metrics[plan_key] / metrics[key] - 1, 3) + 0.0:+.1%})"
        for plan_key, key in MEASURED_KEYS.items()
        if metrics.get(plan_key) is not None and metrics.get(key)
    )
