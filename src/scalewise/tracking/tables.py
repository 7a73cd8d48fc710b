"""W&B tables: the plan of a run, and predicted vs. measured values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalewise.metric_names import METRICS

MEASURED_KEYS = {"plan/peak_bytes": "memory/peak_bytes", "plan/step_s": "time/step_s"}
"""Key of the measured metric by key of the predicted one."""


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
