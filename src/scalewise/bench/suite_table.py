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


def gpu_table(entries: Entries) -> list[str]:
    """Table of training runs, and another one of the cases that are compared with a baseline."""
    compared = {name: entry for name, entry in entries.items() if "figure" in entry}
    trained = {name: entry for name, entry in entries.items() if name not in compared}
    return [*training_table(trained), *(["", *figure_table(compared)] if compared else [])]


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


def figure_table(entries: Entries) -> list[str]:
    """Table of figures with their 95 % intervals and self-checks."""
    rows = [(name, *_figure_cells(entry)) for name, entry in entries.items()]
    return list(markdown_table(("case", "figure", "95 % interval", "", "self-check"), rows))


def _figure_cells(entry: Mapping[str, Any]) -> list[str]:
    if "figure" not in entry:
        return [str(entry["status"]).replace("_", " "), MISSING, MISSING, MISSING]
    check = entry.get("self_check")
    return [
        _short(entry["figure"]),
        f"{_short(entry['low'])} to {_short(entry['high'])}",
        entry["unit"],
        MISSING if check is None else f"{check:.3f}" + " (noisy)" * (entry["status"] == "noisy"),
    ]


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3f}"


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
    """Tables of all records of ``bench gpu``, or how to write one."""
    return _section(records, "gpu", gpu_table)


def comparison_section(records: Path) -> str:
    """Tables of all records of ``bench all``, or how to write one."""
    return _section(records, "all", figure_table)


def _section(records: Path, name: str, table: Callable[[Entries], list[str]]) -> str:
    sections = []
    for path in sorted(records.glob(f"*/{name}.json")):
        record = json.loads(path.read_text("utf-8"))
        entries = record["cases"]
        devices, versions = (
            ", ".join(sorted({entry[key] for entry in entries.values()}))
            for key in ("device", "torch")
        )
        heading = f"{devices}, torch {versions}, {record['date'][:10]}:"
        tables = (*table(entries), "", *aims_table(record["aims"]))
        sections.append("\n".join((heading, "", *tables)))
    return "\n\n".join(sections) or f"No record exists yet: `scalewise bench {name}` writes one."
