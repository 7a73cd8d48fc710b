"""What a report says, in order, made once from the records: a page and W&B only render it.

Texts are plain strings, which a rendering escapes, or HTML-safe ``Markup`` whose only element
with a meaning is ``<b>``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from scalewise.reports import (
    budgets,
    changes,
    compare,
    coordinates,
    findings,
    headings,
    importance,
    learning,
    outcomes,
    overview,
    preferences,
    repeat,
    screening,
    sections,
    tradeoff,
)
from scalewise.reports.compare import Comparison, Job
from scalewise.reports.live import Comparer, Drawn
from scalewise.reports.numbers import MemoryUnit, memory_unit
from scalewise.reports.overview import Card, Column, Matrix
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.sections import Section


@dataclass(frozen=True)
class Varied:
    """Which jobs ran, by what they were set to; ``statuses`` are the glyphs in use."""

    ident: ClassVar[str] = "varied"
    topic: ClassVar[str] = "What varied"
    finding: str
    matrices: tuple[Matrix, ...]
    statuses: tuple[str, ...]
    notes: tuple[Markup, ...]


@dataclass(frozen=True)
class Compared:
    """One row a job, one column a number."""

    ident: ClassVar[str] = "compare"
    topic: ClassVar[str] = "Comparison"
    finding: str
    rows: tuple[Job, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @property
    def tall(self) -> bool:
        """Whether there are more rows than a screen shows."""
        return len(self.rows) > compare.SHOWN


@dataclass(frozen=True)
class Failed:
    """One card for each way of not finishing; ``more`` for those beyond the first."""

    ident: ClassVar[str] = "failed"
    topic: ClassVar[str] = "What failed"
    finding: str
    cards: tuple[Card, ...]
    more: tuple[Card, ...]


@dataclass(frozen=True)
class Repeat:
    """What to paste, what was set, where it ran."""

    ident: ClassVar[str] = "repeat"
    topic: ClassVar[str] = "Repeat"
    finding: str
    commands: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    report: str
    """Address of the W&B report; empty where there is none."""
    changes: tuple[tuple[str, str, str], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """Titles of tables with their rows of a name and a text."""
    live: tuple[Drawn, ...] = ()


Part = Varied | Compared | Section | Failed | Repeat


@dataclass(frozen=True)
class Outline:
    """A report: its head, then its parts."""

    record: RunRecord | SweepRecord
    comparison: Comparison
    verdict: Markup
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]

    @property
    def kind(self) -> str:
        """Returns ``sweep`` or ``run``."""
        return "sweep" if isinstance(self.record, SweepRecord) else "run"

    @property
    def title(self) -> str:
        """Returns the question, or where none was asked the name."""
        return self.record.question or self.record.name


def of(record: RunRecord | SweepRecord) -> Outline:
    """Returns the report of ``record``."""
    if isinstance(record, SweepRecord):
        comparison = compare.of_sweep(record)
    else:
        comparison = compare.of_run(record)
    peaks = [peak for job in comparison.jobs if (peak := job.measured(compare.PEAK)) is not None]
    unit = memory_unit(peaks)
    parts = _of_sweep if isinstance(record, SweepRecord) else _of_run
    return Outline(
        record,
        comparison,
        findings.verdict(comparison, unit),
        tuple(overview.facts(comparison, record)),
        (*parts(comparison, unit), _repeat(comparison, record)),
    )


def _of_run(comparison: Comparison, unit: MemoryUnit) -> Iterator[Part]:
    (job,) = comparison.jobs
    yield from _failed(comparison)
    drawn = (
        budgets.memory(comparison, unit),
        budgets.time(comparison),
        learning.loss_of_one(job),
        preferences.section([job]),
        outcomes.section(outcomes.REWARDED, [job]),
        outcomes.section(outcomes.CLASSIFIED, [job]),
        learning.throughput(job),
    )
    yield from (section for section in drawn if section is not None)


def _of_sweep(comparison: Comparison, unit: MemoryUnit) -> Iterator[Part]:
    yield _varied(comparison)
    yield _compared(comparison, unit)
    drawn = (
        changes.changes(comparison, unit),
        budgets.memory(comparison, unit),
        budgets.time(comparison),
        learning.loss(comparison),
        preferences.section(comparison.jobs),
        outcomes.section(outcomes.REWARDED, comparison.jobs),
        outcomes.section(outcomes.CLASSIFIED, comparison.jobs),
        tradeoff.trade(comparison, unit),
        coordinates.coordinates(comparison, unit),
        importance.importance(comparison),
        screening.section(comparison),
    )
    yield from (section for section in drawn if section is not None)
    yield from _failed(comparison)


def _varied(comparison: Comparison) -> Varied:
    held, empty = overview.held_constant(comparison), overview.empty_cells(comparison)
    notes = [
        Markup("{}").format(overview.summed(comparison)),
        Markup("<b>Held constant:</b> {}.").format(held) if held else Markup(),
        Markup("<b>No job:</b> the sweep left out {} of the possible combinations.").format(empty)
        if empty
        else Markup(),
    ]
    return Varied(
        headings.varied(comparison),
        tuple(overview.matrices(comparison)),
        tuple(dict.fromkeys(overview.glyph(job.run) for job in comparison.jobs)),
        tuple(note for note in notes if note),
    )


def _compared(comparison: Comparison, unit: MemoryUnit) -> Compared:
    columns = tuple(overview.table(comparison, unit))
    window, reference = sections.window(comparison.jobs), comparison.reference
    notes = [f"Times and rates are the {window}."] if window else []
    if any(column.label.endswith(" error") for column in columns):
        notes.append("Error is what the planner foresaw, less what was measured, over that.")
    if reference:
        notes.append(
            f"Distance is the largest difference of train loss from {reference.name} over the"
            " steps."
        )
    return Compared(
        headings.comparison_heading(comparison),
        tuple(overview.order(comparison)),
        columns,
        tuple(notes),
    )


def _failed(comparison: Comparison) -> Iterator[Failed]:
    cards = tuple(overview.cards(comparison))
    if cards:
        shown, more = cards[: overview.CARDS], cards[overview.CARDS :]
        yield Failed(headings.failed_heading(comparison), shown, more)


def _repeat(comparison: Comparison, record: RunRecord | SweepRecord) -> Repeat:
    each = isinstance(record, SweepRecord)
    tables = (
        ("Environment", tuple(repeat.environment(comparison))),
        ("Versions", tuple(repeat.versions(comparison))),
    )
    return Repeat(
        "One command for the sweep, one for any job" if each else "One command for the run",
        tuple(repeat.commands(comparison, record)),
        tuple(repeat.links(comparison)),
        repeat.web(record.wandb.get("report")),
        tuple(repeat.changes(comparison)),
        tuple((title, rows) for title, rows in tables if rows),
        (Drawn("What was set otherwise", Comparer()),) if each else (),
    )
