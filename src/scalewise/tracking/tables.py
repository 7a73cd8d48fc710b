"""What W&B shows as tables: what was foreseen of a run, and how it came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalewise.tracking.metric_names import METRICS

PAIRS = {"plan/peak_bytes": "memory/peak_bytes", "plan/step_s": "time/step_s"}
"""What was foreseen, and the metric that it is to be held against."""


@dataclass(frozen=True)
class TextTable:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]


def predicted_tables(plan: Mapping[str, Any]) -> dict[str, TextTable]:
    """Returns the tables of a ``plan.json``, by key: bytes of the fullest device, seconds."""
    sent = [
        (c["kind"], " ".join(c["axes"]), c["what"], c["bytes"], c["count"], c["bytes"] * c["count"])
        for c in plan.get("collectives", [])
    ]
    collectives = ("kind", "axes", "what", "bytes", "count", "bytes_per_step")
    tables = {
        "plan/ledger": TextTable(("line", "bytes_at_peak"), _mapping_rows(plan, "ledger")),
        "plan/phases": TextTable(("phase", "bytes"), _mapping_rows(plan, "phases")),
        "plan/step_parts": TextTable(("part", "seconds"), _mapping_rows(plan, "step_parts")),
        "plan/collectives": TextTable(collectives, sent),
    }
    return {key: table for key, table in tables.items() if table.rows}


def measured_table(plan: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, TextTable]:
    """Returns what a run measured, and beside it what was foreseen; ``metrics`` of its summary."""
    memory = [
        (key.removeprefix("memory/").removesuffix("_bytes"), metrics[key])
        for key in METRICS
        if key.startswith("memory/") and metrics.get(key) is not None
    ]
    tables = {
        "memory/measured": TextTable(("part", "bytes"), memory),
        "plan/against_measured": TextTable(
            ("metric", "unit", "foreseen", "measured", "foreseen_over_measured"),
            list(_comparison_row(plan, metrics)),
        ),
    }
    return {key: table for key, table in tables.items() if table.rows}


def _mapping_rows(plan: Mapping[str, Any], key: str) -> list[tuple[object, ...]]:
    return [(name, value) for name, value in plan.get(key, {}).items() if value is not None]


def _comparison_row(
    plan: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Iterator[tuple[object, ...]]:
    for said, key in PAIRS.items():
        planned, found = plan.get(said), metrics.get(key)
        if planned is not None and found:
            ratio = planned / found
            yield key, METRICS[key].unit, float(planned), float(found), ratio
