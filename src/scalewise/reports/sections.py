"""Building blocks of the chart sections, and texts that several sections share."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from scalewise.reports import summary_sentences
from scalewise.reports.chart_layout import ChartPicture
from scalewise.reports.compare import MAX_CHARTED_JOBS, ReportComparison, ReportJob
from scalewise.reports.wandb_panels import TitledPanel


@dataclass(frozen=True)
class ChartPanel:
    """A chart with its title."""

    title: str
    """Title in bold."""
    detail: str
    """Unit and scope, after the title."""
    picture: ChartPicture
    """The chart."""


@dataclass(frozen=True)
class NumbersTable:
    """The values of a chart as a table."""

    corner: str
    """Heading of the first column."""
    heads: tuple[str, ...]
    """Headings of the other columns."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Row name and cells."""


@dataclass(frozen=True)
class ReportSection:
    """A report section with charts."""

    anchor: str
    """Id of the section's HTML element."""
    topic: str
    """First words of the heading, the same in every report."""
    finding: str
    """Heading after the topic, chosen from the numbers."""
    panels: tuple[ChartPanel, ...]
    """Charts of the HTML page."""
    key: tuple[tuple[str, str], ...] = ()
    """Legend: CSS color variable or shape, and label."""
    notes: tuple[str | Markup, ...] = ()
    """Findings next to the charts."""
    numbers: NumbersTable | None = None
    """Values of the charts."""
    explanation: tuple[str | Markup, ...] = ()
    """Notes on how to read the charts."""
    bullets: tuple[str | Markup, ...] = ()
    """Bulleted findings above the charts."""
    wandb_panels: tuple[TitledPanel, ...] = ()
    """Panels of the W&B report, in place of ``panels``."""


def charted_jobs_text(comparison: ReportComparison, charted: Sequence[ReportJob]) -> str:
    """Note on the charted jobs, if a chart cannot show all; else empty."""
    total = len(comparison.jobs)
    if total <= MAX_CHARTED_JOBS:
        return ""
    return f"; {len(charted)} of {total} jobs: the Pareto front, then the fastest"


def missing_jobs_note(comparison: ReportComparison, charted: Sequence[ReportJob]) -> list[str]:
    """Note on the jobs without a measurement to chart; empty if there are none."""
    if len(comparison.jobs) > MAX_CHARTED_JOBS:
        return []
    missing = [job for job in comparison.jobs if job not in charted and job.run.status != "not_run"]
    if not missing:
        return []
    names = [f"{job.name} ({summary_sentences.status_word(job.run.status)})" for job in missing]
    return [f"No measurement, not charted: {'; '.join(names)}."]


def window_note(jobs: Sequence[ReportJob]) -> str:
    """Steps and statistic behind the reported medians; empty if the jobs differ in them."""
    windows = {job.run.summary.window for job in jobs if job.run.summary and job.run.summary.window}
    return windows.pop().replace("-", "\u2013") if len(windows) == 1 else ""
