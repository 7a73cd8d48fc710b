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
    ablation_effects,
    breakdown_charts,
    compare,
    factorial_report,
    importance,
    loss_curves,
    outcomes,
    parallel_coordinates,
    pareto,
    preferences,
    reproduce,
    section_titles,
    sections,
    summary_sentences,
    summary_tables,
)
from scalewise.reports.compare import ReportComparison, ReportJob
from scalewise.reports.number_format import MemoryUnit, memory_unit
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.sections import ReportSection
from scalewise.reports.summary_tables import FailureCard, OutcomeMatrix, TableColumn
from scalewise.reports.wandb_panels import RunComparerPanel, TitledPanel


@dataclass(frozen=True)
class VariedPart:
    """Which jobs ran, by what they were set to; ``statuses`` are the glyphs in use."""

    ident: ClassVar[str] = "varied"
    topic: ClassVar[str] = "What varied"
    finding: str
    matrices: tuple[OutcomeMatrix, ...]
    statuses: tuple[str, ...]
    notes: tuple[Markup, ...]


@dataclass(frozen=True)
class ComparedPart:
    """One row a job, one column a number."""

    ident: ClassVar[str] = "compare"
    topic: ClassVar[str] = "Comparison"
    finding: str
    rows: tuple[ReportJob, ...]
    columns: tuple[TableColumn, ...]
    notes: tuple[str, ...]

    @property
    def tall(self) -> bool:
        """Whether there are more rows than a screen shows."""
        return len(self.rows) > compare.SHOWN


@dataclass(frozen=True)
class FailedPart:
    """One card for each way of not finishing; ``more`` for those beyond the first."""

    ident: ClassVar[str] = "failed"
    topic: ClassVar[str] = "What failed"
    finding: str
    cards: tuple[FailureCard, ...]
    more: tuple[FailureCard, ...]


@dataclass(frozen=True)
class ReproducePart:
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
    live: tuple[TitledPanel, ...] = ()


Part = VariedPart | ComparedPart | ReportSection | FailedPart | ReproducePart


@dataclass(frozen=True)
class ReportModel:
    """A report: its head, then its parts."""

    record: RunRecord | SweepRecord
    comparison: ReportComparison
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


def build_report(record: RunRecord | SweepRecord) -> ReportModel:
    """Returns the report of ``record``."""
    if isinstance(record, SweepRecord):
        comparison = compare.compare_sweep(record)
    else:
        comparison = compare.compare_run(record)
    peaks = [peak for job in comparison.jobs if (peak := job.measured(compare.PEAK)) is not None]
    unit = memory_unit(peaks)
    parts = _sweep_report if isinstance(record, SweepRecord) else _run_report
    return ReportModel(
        record,
        comparison,
        summary_sentences.summary_text(comparison, unit),
        tuple(summary_tables.header_facts(comparison, record)),
        (*parts(comparison, unit), _reproduce_part(comparison, record)),
    )


def _run_report(comparison: ReportComparison, unit: MemoryUnit) -> Iterator[Part]:
    (job,) = comparison.jobs
    yield from _failed_part(comparison)
    drawn = (
        breakdown_charts.memory_section(comparison, unit),
        breakdown_charts.time_section(comparison),
        loss_curves.run_loss_section(job),
        preferences.preference_section([job]),
        outcomes.outcome_section(outcomes.REWARDED, [job]),
        outcomes.outcome_section(outcomes.CLASSIFIED, [job]),
        loss_curves.throughput_section(job),
    )
    yield from (section for section in drawn if section is not None)


def _sweep_report(comparison: ReportComparison, unit: MemoryUnit) -> Iterator[Part]:
    yield _varied_part(comparison)
    yield _compared_part(comparison, unit)
    drawn = (
        ablation_effects.changes_section(comparison, unit),
        breakdown_charts.memory_section(comparison, unit),
        breakdown_charts.time_section(comparison),
        loss_curves.loss_section(comparison),
        preferences.preference_section(comparison.jobs),
        outcomes.outcome_section(outcomes.REWARDED, comparison.jobs),
        outcomes.outcome_section(outcomes.CLASSIFIED, comparison.jobs),
        pareto.tradeoff_section(comparison, unit),
        parallel_coordinates.coordinates_section(comparison, unit),
        importance.importance_section(comparison),
        factorial_report.screening_section(comparison),
    )
    yield from (section for section in drawn if section is not None)
    yield from _failed_part(comparison)


def _varied_part(comparison: ReportComparison) -> VariedPart:
    held, empty = summary_tables.held_constant(comparison), summary_tables.empty_cells(comparison)
    notes = [
        Markup("{}").format(summary_tables.matrix_sum_text(comparison)),
        Markup("<b>Held constant:</b> {}.").format(held) if held else Markup(),
        Markup("<b>No job:</b> the sweep left out {} of the possible combinations.").format(empty)
        if empty
        else Markup(),
    ]
    return VariedPart(
        section_titles.matrix_heading(comparison),
        tuple(summary_tables.outcome_matrices(comparison)),
        tuple(dict.fromkeys(summary_tables.status_glyph(job.run) for job in comparison.jobs)),
        tuple(note for note in notes if note),
    )


def _compared_part(comparison: ReportComparison, unit: MemoryUnit) -> ComparedPart:
    columns = tuple(summary_tables.comparison_table(comparison, unit))
    window, reference = sections.window_note(comparison.jobs), comparison.reference
    notes = [f"Times and rates are the {window}."] if window else []
    if any(column.label.endswith(" error") for column in columns):
        notes.append("Error is what the planner foresaw, less what was measured, over that.")
    if reference:
        notes.append(
            f"Distance is the largest difference of train loss from {reference.name} over the"
            " steps."
        )
    return ComparedPart(
        section_titles.comparison_heading(comparison),
        tuple(summary_tables.order_jobs(comparison)),
        columns,
        tuple(notes),
    )


def _failed_part(comparison: ReportComparison) -> Iterator[FailedPart]:
    cards = tuple(summary_tables.failure_cards(comparison))
    if cards:
        shown, more = cards[: summary_tables.CARDS], cards[summary_tables.CARDS :]
        yield FailedPart(section_titles.failed_heading(comparison), shown, more)


def _reproduce_part(comparison: ReportComparison, record: RunRecord | SweepRecord) -> ReproducePart:
    each = isinstance(record, SweepRecord)
    tables = (
        ("Environment", tuple(reproduce.environment_facts(comparison))),
        ("Versions", tuple(reproduce.software_versions(comparison))),
    )
    return ReproducePart(
        "One command for the sweep, one for any job" if each else "One command for the run",
        tuple(reproduce.reproduce_commands(comparison, record)),
        tuple(reproduce.wandb_links(comparison)),
        reproduce.web_address(record.wandb.get("report")),
        tuple(reproduce.setting_changes(comparison)),
        tuple((title, rows) for title, rows in tables if rows),
        (TitledPanel("What was set otherwise", RunComparerPanel()),) if each else (),
    )
