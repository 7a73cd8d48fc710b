"""Tables of the records of suites, in Markdown, for the console and the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalewise.console import MISSING
from scalewise.units import format_bytes, format_seconds

Entries = Mapping[str, Mapping[str, Any]]
"""Entries of a suite's record by case."""

GPU_RECORD = "gpu.json"


@dataclass(frozen=True)
class Aim:
    """Bound of a figure that a suite measures."""

    text: str
    """Description of the figure, which ends with ``at least`` or ``at most``."""
    bound: float
    """Bound of the figure."""
    figure: Callable[[Entries], float | None]
    """Function that computes the figure from the entries; None: the cases are missing."""
    is_minimum: bool = True
    """Whether larger figures are better."""

    def evaluate(self, entries: Entries) -> dict[str, object]:
        """Bound, figure and whether it is reached, for the record."""
        figure = self.figure(entries)
        reached = None
        if figure is not None:
            reached = figure >= self.bound if self.is_minimum else figure <= self.bound
        return {"aim": self.text, "bound": self.bound, "figure": figure, "reached": reached}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table; columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in (header, rule, *rows):
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield f"| {' | '.join(cells)} |"


TRAINING_HEADER = (
    "case",
    "step",
    "tokens/s",
    "MFU",
    "MFU (PaLM)",
    "peak",
    "reserved",
    "planned peak",
    "planned step",
    "first step",
)


def training_table(entries: Entries) -> list[str]:
    """Table of training runs; errors of the plan are positive if it is too high."""
    rows = [(name, *_training_cells(entry)) for name, entry in entries.items()]
    return list(markdown_table(TRAINING_HEADER, rows))


def _training_cells(entry: Mapping[str, Any]) -> list[str]:
    if entry["status"] != "ok":
        status = str(entry["status"]).replace("_", " ")
        return [status, *[MISSING] * (len(TRAINING_HEADER) - 2)]

    def cell(key: str, template: str) -> str:
        return MISSING if entry[key] is None else template.format(entry[key])

    reserved = entry["reserved_bytes"]
    return [
        format_seconds(entry["step_s"]["median"]),
        cell("tokens_per_s", "{:,.0f}"),
        cell("mfu", "{:.1%}"),
        cell("mfu_palm", "{:.1%}"),
        format_bytes(entry["peak_bytes"]),
        MISSING if reserved is None else format_bytes(reserved),
        cell("peak_error", "{:+.1%}"),
        cell("step_error", "{:+.1%}"),
        format_seconds(entry["first_step_s"]),
    ]


def aims_table(aims: Sequence[Mapping[str, Any]]) -> list[str]:
    """Table of aims with their figures."""
    rows = [
        (
            aim["aim"],
            f"{aim['bound']:g}",
            MISSING if aim["figure"] is None else f"{aim['figure']:.3f}",
            {True: "yes", False: "no", None: MISSING}[aim["reached"]],
        )
        for aim in aims
    ]
    return list(markdown_table(("figure", "aim", "measured", "reached"), rows))


def gpu_section(records: Path) -> str:
    """Tables of all GPU records, or how to write one."""
    files = sorted(records.glob(f"*/{GPU_RECORD}"))
    if not files:
        return "No GPU record exists yet: `scalewise bench gpu` writes one."
    sections = []
    for path in files:
        record = json.loads(path.read_text("utf-8"))
        entries = record["cases"]
        devices = ", ".join(sorted({entry["device"] for entry in entries.values()}))
        versions = ", ".join(sorted({entry["torch"] for entry in entries.values()}))
        sections += [
            f"{devices}, torch {versions}, {record['date'][:10]}:",
            *("", *training_table(entries), ""),
            *(*aims_table(record["aims"]), ""),
        ]
    return "\n".join(sections[:-1])
