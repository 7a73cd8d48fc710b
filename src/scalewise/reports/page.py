"""Writes ``report.html``: one file, no network, the same bytes for the same records."""

import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scalewise.reports import (
    budgets,
    compare,
    findings,
    headings,
    learning,
    overview,
    records,
    screening,
    sections,
    tradeoff,
)
from scalewise.reports.compare import Comparison
from scalewise.reports.numbers import MemoryUnit, memory_unit
from scalewise.reports.records import RunRecord, SweepRecord

FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"


def write(folder: Path) -> Path:
    """Writes the page of the run or sweep in ``folder`` and returns its path.

    The page appears whole or not at all. Raises :class:`scalewise.errors.ScalewiseError` where
    the folder holds neither a run nor a sweep.
    """
    text = build(records.read(folder))
    path = folder / FILE
    draft = folder / f".{FILE}.{os.getpid()}"
    try:
        draft.write_text(text, "utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def build(record: RunRecord | SweepRecord) -> str:
    """Returns the HTML of ``record``'s page."""
    sweep = isinstance(record, SweepRecord)
    if isinstance(record, SweepRecord):
        comparison = compare.of_sweep(record)
    else:
        comparison = compare.of_run(record)
    peaks = [peak for job in comparison.jobs if (peak := job.measured(compare.PEAK)) is not None]
    unit = memory_unit(peaks)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        status_word=findings.status_word,
        glyph=overview.glyph,
    )
    rows = overview.order(comparison)
    cards = overview.cards(comparison)
    html = environment.get_template("page.html.j2").render(
        sweep=sweep,
        record=record,
        jobs=comparison.jobs,
        rows=rows,
        verdict=findings.verdict(comparison, unit),
        facts=overview.facts(comparison, record),
        varied=headings.varied(comparison) if sweep else "",
        matrices=overview.matrices(comparison) if sweep else [],
        statuses=list(dict.fromkeys(overview.glyph(job.run) for job in comparison.jobs)),
        held=overview.held_constant(comparison),
        summed=overview.summed(comparison) if sweep else "",
        tall=len(comparison.jobs) > compare.SHOWN,
        empty=overview.empty_cells(comparison) if sweep else 0,
        table_finding=headings.comparison_heading(comparison),
        columns=overview.table(comparison, unit) if sweep else [],
        headline=comparison.headline[0],
        window=sections.window(comparison.jobs),
        reference=comparison.reference,
        sections=_sections(comparison, unit),
        failed_finding=headings.failed_heading(comparison),
        cards=cards[: overview.CARDS],
        more=cards[overview.CARDS :],
        commands=overview.commands(comparison, record),
        changes=overview.changes(comparison),
        environment=overview.environment(comparison),
        versions=overview.versions(comparison),
        links=overview.links(comparison),
    )
    return str(html)


def _sections(comparison: Comparison, unit: MemoryUnit) -> list[sections.Section]:
    if comparison.reference is None:
        only = comparison.jobs[:1]
        found = [
            budgets.memory(comparison, unit),
            budgets.time(comparison),
            *(learning.loss_of_one(job) for job in only),
            *(learning.throughput(job) for job in only),
        ]
    else:
        found = [
            budgets.memory(comparison, unit),
            budgets.time(comparison),
            learning.loss(comparison),
            tradeoff.trade(comparison, unit),
            screening.section(comparison),
        ]
    return [section for section in found if section is not None]
