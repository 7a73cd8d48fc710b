"""What a drawn part of a report is made of, and what the parts say in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from scalewise.reports import summary_sentences
from scalewise.reports.chart_layout import ChartPicture
from scalewise.reports.compare import SHOWN, ReportComparison, ReportJob
from scalewise.reports.wandb_panels import TitledPanel


@dataclass(frozen=True)
class ChartPanel:
    """One chart under its title."""

    title: str
    detail: str
    picture: ChartPicture


@dataclass(frozen=True)
class NumbersTable:
    """The numbers of a chart as a table: its corner, its heads and a row a job."""

    corner: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class ReportSection:
    """One drawn part of a report.

    ``key`` holds colour variables (or a shape) and their labels, ``reading`` how to read the
    panels, ``notes`` what follows, ``said`` sentences that stand where a picture would, ``live``
    what W&B draws in the place of ``panels``.
    """

    ident: str
    topic: str
    finding: str
    panels: tuple[ChartPanel, ...]
    key: tuple[tuple[str, str], ...] = ()
    notes: tuple[str | Markup, ...] = ()
    numbers: NumbersTable | None = None
    reading: tuple[str | Markup, ...] = ()
    said: tuple[str | Markup, ...] = ()
    live: tuple[TitledPanel, ...] = ()


def drawn_jobs(comparison: ReportComparison, drawn: Sequence[ReportJob]) -> str:
    """Returns which jobs are drawn, where there are too many for all."""
    every = len(comparison.jobs)
    return f"; {len(drawn)} of {every} jobs: the front, then the fastest" if every > SHOWN else ""


def left_out_note(comparison: ReportComparison, drawn: Sequence[ReportJob]) -> list[str]:
    """Returns a note on the jobs that measured nothing to draw, if there are any."""
    if len(comparison.jobs) > SHOWN:
        return []
    missing = [job for job in comparison.jobs if job not in drawn and job.run.status != "not_run"]
    if not missing:
        return []
    names = [f"{job.name} ({summary_sentences.status_word(job.run.status)})" for job in missing]
    return [f"Not drawn, for want of a measurement: {'; '.join(names)}."]


def window_note(jobs: Sequence[ReportJob]) -> str:
    """Returns the steps and the statistic behind the medians, if all jobs share them."""
    windows = {job.run.summary.window for job in jobs if job.run.summary and job.run.summary.window}
    return windows.pop().replace("-", "\u2013") if len(windows) == 1 else ""
