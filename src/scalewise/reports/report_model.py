"""Contents of a report, independent of the renderer (HTML page or W&B report).

A text is a plain string, which the renderer escapes, or an HTML-safe ``Markup`` in which only
``<b>`` has a meaning.
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
    goodput_table,
    grading,
    importance,
    loss_curves,
    parallel_coordinates,
    pareto,
    reproduce,
    sections,
    summary_sentences,
    summary_tables,
    throughput_curve,
    validation_outcomes,
)
from scalewise.reports.compare import ReportComparison, ReportJob
from scalewise.reports.number_format import MemoryUnit, memory_unit
from scalewise.reports.records import RunRecord, SweepRecord
from scalewise.reports.sections import ReportSection
from scalewise.reports.summary_tables import FailureCard, OutcomeMatrix, TableColumn
from scalewise.reports.wandb_panels import RunComparerPanel, TitledPanel


@dataclass(frozen=True)
class VariedPart:
    """Overview of a sweep: its jobs by the values of the varied settings."""

    anchor: ClassVar[str] = "overview"
    topic: ClassVar[str] = "Sweep overview"
    finding: str
    """Heading after the topic."""
    matrices: tuple[OutcomeMatrix, ...]
    """Job outcomes by the varied settings."""
    statuses: tuple[str, ...]
    """Statuses in the legend."""
    notes: tuple[Markup, ...]
    """Notes next to the matrices."""


@dataclass(frozen=True)
class ComparedPart:
    """Comparison table: one row per job, one column per metric."""

    anchor: ClassVar[str] = "comparison"
    topic: ClassVar[str] = "Comparison"
    finding: str
    """Heading after the topic."""
    rows: tuple[ReportJob, ...]
    """Jobs in the initial sort order."""
    columns: tuple[TableColumn, ...]
    """Metric columns."""
    notes: tuple[str, ...]
    """Notes below the table."""

    @property
    def is_long(self) -> bool:
        """Whether the table needs its own scroll box."""
        return len(self.rows) > compare.MAX_CHARTED_JOBS


@dataclass(frozen=True)
class FailedPart:
    """Failed jobs: one card per distinct failure."""

    anchor: ClassVar[str] = "failed"
    topic: ClassVar[str] = "Failed jobs"
    finding: str
    """Heading after the topic."""
    cards: tuple[FailureCard, ...]
    """Failures shown as cards."""
    further_cards: tuple[FailureCard, ...]
    """Failures beyond the first ``MAX_CARDS``, shown as table rows."""


@dataclass(frozen=True)
class ReproducePart:
    """Commands, settings, environment and versions."""

    anchor: ClassVar[str] = "reproduce"
    topic: ClassVar[str] = "Reproduce"
    finding: str
    """Heading after the topic."""
    commands: tuple[tuple[str, str], ...]
    """Description and command line."""
    links: tuple[tuple[str, str], ...]
    """Job name and URL of its W&B run."""
    report: str
    """URL of the W&B report; empty if it is not published."""
    changes: tuple[tuple[str, str, str], ...]
    """Key, default and value of each changed setting."""
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """Title and rows (name, text) of each table."""
    wandb_panels: tuple[TitledPanel, ...] = ()
    """Panels of the W&B report."""


Part = VariedPart | ComparedPart | ReportSection | FailedPart | ReproducePart


@dataclass(frozen=True)
class ReportModel:
    """A report: header and sections."""

    record: RunRecord | SweepRecord
    """Record of the run or sweep."""
    comparison: ReportComparison
    """Jobs under their report names."""
    summary: Markup
    """Summary sentences below the title."""
    facts: tuple[tuple[str, str], ...]
    """Label and text of each header fact."""
    parts: tuple[Part, ...]
    """Sections in page order."""

    @property
    def kind(self) -> str:
        """``sweep`` or ``run``."""
        return "sweep" if isinstance(self.record, SweepRecord) else "run"

    @property
    def title(self) -> str:
        """The question of the record, else its name."""
        return self.record.question or self.record.name


def build_report(record: RunRecord | SweepRecord) -> ReportModel:
    """Build the report of a run or sweep."""
    if isinstance(record, SweepRecord):
        comparison = compare.compare_sweep(record)
    else:
        comparison = compare.compare_run(record)
    peaks = [peak for job in comparison.jobs if (peak := job.measured(compare.PEAK)) is not None]
    unit = memory_unit(peaks)
    if isinstance(record, SweepRecord):
        parts = _sweep_report(record, comparison, unit)
    else:
        parts = _run_report(comparison, unit)
    return ReportModel(
        record,
        comparison,
        summary_sentences.summary_text(comparison, unit),
        tuple(summary_tables.header_facts(comparison, record)),
        (*parts, _reproduce_part(comparison, record)),
    )


def _run_report(comparison: ReportComparison, unit: MemoryUnit) -> Iterator[Part]:
    (job,) = comparison.jobs
    yield from _failed_part(comparison)
    sections = (
        breakdown_charts.memory_section(comparison, unit),
        breakdown_charts.time_section(comparison),
        loss_curves.run_loss_section(job),
        validation_outcomes.preference_section([job]),
        validation_outcomes.outcome_section(validation_outcomes.REWARDED, [job]),
        validation_outcomes.outcome_section(validation_outcomes.CLASSIFIED, [job]),
        throughput_curve.throughput_section(job),
        goodput_table.goodput_section(job),
    )
    yield from (section for section in sections if section is not None)


def _sweep_report(
    sweep: SweepRecord, comparison: ReportComparison, unit: MemoryUnit
) -> Iterator[Part]:
    if (section := grading.expectations_section(sweep)) is not None:
        yield section
    yield _varied_part(comparison)
    yield _compared_part(comparison, unit)
    sections = (
        ablation_effects.changes_section(comparison, unit),
        breakdown_charts.memory_section(comparison, unit),
        breakdown_charts.time_section(comparison),
        loss_curves.loss_section(comparison),
        validation_outcomes.preference_section(comparison.jobs),
        validation_outcomes.outcome_section(validation_outcomes.REWARDED, comparison.jobs),
        validation_outcomes.outcome_section(validation_outcomes.CLASSIFIED, comparison.jobs),
        pareto.tradeoff_section(comparison, unit),
        parallel_coordinates.coordinates_section(comparison, unit),
        importance.importance_section(comparison),
        factorial_report.screening_section(comparison),
    )
    yield from (section for section in sections if section is not None)
    yield from _failed_part(comparison)
    if (section := grading.answer_section(sweep)) is not None:
        yield section


def _varied_part(comparison: ReportComparison) -> VariedPart:
    constants = summary_tables.constant_settings(comparison)
    num_empty = summary_tables.count_empty_cells(comparison)
    notes = [
        Markup("{}").format(summary_tables.matrix_sum_text(comparison)),
        Markup("<b>Held constant:</b> {}.").format(constants) if constants else Markup(),
        Markup("<b>Not in the sweep:</b> {} of the possible combinations.").format(num_empty)
        if num_empty
        else Markup(),
    ]
    return VariedPart(
        sections.matrix_heading(comparison),
        tuple(summary_tables.outcome_matrices(comparison)),
        tuple(dict.fromkeys(summary_tables.status_glyph(job.run) for job in comparison.jobs)),
        tuple(note for note in notes if note),
    )


def _compared_part(comparison: ReportComparison, unit: MemoryUnit) -> ComparedPart:
    columns = tuple(summary_tables.comparison_table(comparison, unit))
    window, reference = sections.window_note(comparison.jobs), comparison.reference
    notes = [f"Times and rates are the {window}."] if window else []
    if any(column.label.endswith(" error") for column in columns):
        notes.append("Error is (predicted \u2212 measured) / measured.")
    if reference:
        notes.append(
            f"The loss difference is the largest absolute difference of train loss from"
            f" {reference.name} at the same step."
        )
    return ComparedPart(
        sections.comparison_heading(comparison),
        tuple(summary_tables.order_jobs(comparison)),
        columns,
        tuple(notes),
    )


def _failed_part(comparison: ReportComparison) -> Iterator[FailedPart]:
    cards = tuple(summary_tables.failure_cards(comparison))
    if cards:
        first, further = cards[: summary_tables.MAX_CARDS], cards[summary_tables.MAX_CARDS :]
        yield FailedPart(sections.failed_heading(comparison), first, further)


def _reproduce_part(comparison: ReportComparison, record: RunRecord | SweepRecord) -> ReproducePart:
    is_sweep = isinstance(record, SweepRecord)
    tables = (
        ("Environment", tuple(reproduce.environment_facts(comparison))),
        ("Versions", tuple(reproduce.software_versions(comparison))),
    )
    return ReproducePart(
        "Commands, settings and environment",
        tuple(reproduce.reproduce_commands(comparison, record)),
        tuple(reproduce.wandb_links(comparison)),
        reproduce.web_address(record.wandb.get("report")),
        tuple(reproduce.setting_changes(comparison)),
        tuple((title, rows) for title, rows in tables if rows),
        (TitledPanel("Config differences", RunComparerPanel()),) if is_sweep else (),
    )
