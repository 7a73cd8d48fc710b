"""W&B rendering of a report: headings, Markdown blocks and panel grids.

All Markdown syntax from files is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import wandb_workspaces.reports.v2 as wr
from markupsafe import Markup

from scalewise.compat.wandb import set_block_id
from scalewise.reports import wandb_panels
from scalewise.reports.report_model import (
    ComparedPart,
    FailedPart,
    Part,
    ReportModel,
    ReproducePart,
    VariedPart,
)
from scalewise.reports.sections import ReportSection
from scalewise.reports.summary_sentences import status_word
from scalewise.reports.summary_tables import FailureCard
from scalewise.reports.wandb_panels import TitledPanel

GRID_COLUMNS = 24
"""Width of a panel grid, in grid units."""
PANEL_HEIGHT = 8
"""Height of a panel, in grid units."""


class ReportBlocks:
    """Builder of the blocks of one report.

    Args:
        runs: Filter expression of the runs that the panels show; ``None`` if W&B has no runs.
    """

    def __init__(self, runs: str | None) -> None:
        self._runs, self._grids, self._panels = runs, 0, 0

    def build(self, report: ReportModel) -> Iterator[Any]:
        """Yield the blocks of the header, then of the sections."""
        yield _text_block(to_markdown(report.summary))
        facts = [f"**{to_markdown(name)}** {to_markdown(text)}" for name, text in report.facts]
        yield _text_block("  \n".join(facts))
        if report.record.command:
            yield _text_block(fenced_block(report.record.command))
        yield wr.TableOfContents()
        for part in report.parts:
            yield wr.H2(text=f"{part.topic}. {to_plain_text(part.finding)}")
            yield from self._part_blocks(part)

    def _part_blocks(self, part: Part) -> Iterator[Any]:
        if isinstance(part, VariedPart):
            yield from _varied_blocks(part)
        elif isinstance(part, ComparedPart):
            yield from _compared_blocks(part)
        elif isinstance(part, FailedPart):
            yield from _failed_blocks(part)
        elif isinstance(part, ReproducePart):
            yield from _reproduce_blocks(part)
            yield from self._grid_blocks(part.wandb_panels)
        else:
            yield from self._iter_section_blocks(part)

    def _iter_section_blocks(self, part: ReportSection) -> Iterator[Any]:
        if part.bullets:
            yield _text_block(markdown_list(part.bullets))
        yield from self._grid_blocks(part.wandb_panels)
        if part.notes:
            yield _text_block("\n\n".join(to_markdown(note) for note in part.notes))
        if part.numbers:
            heads = [part.numbers.corner, *part.numbers.heads]
            rows = [[name, *cells] for name, cells in part.numbers.rows]
            yield _text_block(_table_text(heads, rows))

    def _grid_blocks(self, titled_panels: Sequence[TitledPanel]) -> Iterator[Any]:
        """Yield a grid of the panels, if W&B has runs to show."""
        if not titled_panels or self._runs is None:
            return
        self._grids += 1
        runset = wr.Runset(
            name="Runs", filters=self._runs, order=[wr.OrderBy("CreatedTimestamp", ascending=True)]
        )
        set_block_id(runset, f"runs{self._grids}")  # the default id is random
        width = GRID_COLUMNS if len(titled_panels) == 1 else GRID_COLUMNS // 2
        panels = []
        for index, titled_panel in enumerate(titled_panels):
            layout = wr.Layout(
                x=index * width % GRID_COLUMNS,
                y=index * width // GRID_COLUMNS * PANEL_HEIGHT,
                w=width,
                h=PANEL_HEIGHT,
            )
            self._panels += 1
            panels.append(build_panel(titled_panel, layout=layout))
            set_block_id(panels[-1], f"panel{self._panels}")
        yield wr.PanelGrid(runsets=[runset], panels=panels, hide_run_sets=self._grids > 1)


def build_panel(titled_panel: TitledPanel, **layout: Any) -> Any:
    """Build a W&B panel; ``layout`` is its position in a grid, if any."""
    panel, title = titled_panel.panel, titled_panel.title
    if isinstance(panel, wandb_panels.CurvesPanel):
        return wr.LinePlot(
            title=title,
            x="step",
            y=list(panel.metrics),
            range_y=(0, None) if panel.from_zero else (None, None),
            plot_type="stacked-area" if panel.stacked else "line",
            **layout,
        )
    if isinstance(panel, wandb_panels.BarsPanel):
        return wr.BarPlot(title=title, metrics=[panel.number.name], **layout)
    if isinstance(panel, wandb_panels.ScatterPanel):
        color = _column_key(panel.color) if panel.color else None
        return wr.ScatterPlot(
            title=title, x=_column_key(panel.x), y=_column_key(panel.y), z=color, **layout
        )
    if isinstance(panel, wandb_panels.CoordinatesPanel):
        columns = [
            wr.ParallelCoordinatesPlotColumn(metric=_column_key(axis), display_name=label)
            for axis, label in panel.axes
        ]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns, **layout)
    if isinstance(panel, wandb_panels.ImportancePanel):
        return wr.ParameterImportancePlot(with_respect_to=panel.target.name, **layout)
    return wr.RunComparer(diff_only=True, **layout)


def _column_key(axis: wandb_panels.RunSetting | wandb_panels.SummaryNumber) -> Any:
    kind = wr.Config if isinstance(axis, wandb_panels.RunSetting) else wr.SummaryMetric
    return kind(axis.name)


def run_set_filter(group: str, ids: Sequence[str]) -> str | None:
    """Filter expression for a group, or else for run ids; ``None`` if there are no runs."""
    if group:
        return f"Metric('Group') == {group!r}"  # parsed as Python, so repr quotes it correctly
    return f"Metric('ID') in {list(ids)!r}" if ids else None


def _text_block(text: str) -> Any:
    return wr.MarkdownBlock(text=text)


def _table_text(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True
) -> str:
    of = to_markdown
    return markdown_table(
        [of(head) for head in heads], [[of(c) for c in row] for row in rows], numbers=numbers
    )


def _varied_blocks(part: VariedPart) -> Iterator[Any]:
    for matrix in part.matrices:
        heads = [matrix.row_key, *(f"{matrix.column_key}={c}" if matrix.column_key else "" for c in
                                matrix.columns)]  # fmt: skip
        rows = [
            [
                name,
                *("; ".join(_outcome_text(*one) for one in cell) or "no job" for cell in cells),
            ]
            for name, cells in matrix.rows
        ]
        title = f"{to_markdown(matrix.title)}\n\n" if matrix.title else ""
        yield _text_block(title + _table_text(heads, rows, numbers=False))
    if part.notes:
        yield _text_block("\n\n".join(to_markdown(note) for note in part.notes))


def _outcome_text(status: str, text: str) -> str:
    word = "ok on retry" if status == "retried" else status_word(status)
    return text if text == word else f"{word}: {text}"


def _compared_blocks(part: ComparedPart) -> Iterator[Any]:
    heads = ["job", "status", *(column.label for column in part.columns)]
    rows = []
    for index, job in enumerate(part.rows):
        cells = [column.cells[index] for column in part.columns]
        texts = [f"**{to_markdown(c.text)}**" if c.best else to_markdown(c.text) for c in cells]
        rows.append(
            [
                to_markdown(job.name),
                to_markdown(status_word(job.run.status)),
                *texts,
            ]
        )
    yield _text_block(markdown_table([to_markdown(head) for head in heads], rows))
    yield _text_block(
        to_markdown(" ".join(("Bold: best value of the finished jobs.", *part.notes)))
    )


def _failed_blocks(part: FailedPart) -> Iterator[Any]:
    for card in part.cards:
        yield _text_block("\n\n".join(_card_texts(card)))
    if part.further_cards:
        rows = [[card.name, status_word(card.status), card.reason] for card in part.further_cards]
        yield _text_block(_table_text(["job", "status", "reason"], rows, numbers=False))


def _card_texts(card: FailureCard) -> Iterator[str]:
    of = to_markdown
    location = f" ({card.exit_location})" if card.exit_location else ""
    yield f"**{of(card.name)}, {of(status_word(card.status))}**{of(location)}"
    if card.reason:
        yield of(card.reason)
    if card.other_jobs:
        yield of(
            f"{len(card.other_jobs)} more jobs with the same failure: {'; '.join(card.other_jobs)}."
        )
    if card.log:
        yield fenced_block("\n".join(card.log))
    for override, reason in card.fixes:
        yield f"Suggested fix: {of(reason)}\n\n{fenced_block(override)}"
    if card.command and not card.fixes:
        yield fenced_block(card.command)


def _reproduce_blocks(part: ReproducePart) -> Iterator[Any]:
    for description, command in part.commands:
        text = f"{to_markdown(description)}\n\n{fenced_block(command)}"
        yield _text_block(text)
    if part.links:
        yield _text_block("\n".join(f"- {markdown_link(name, url)}" for name, url in part.links))
    if part.changes:
        yield _text_block(_table_text(["key", "default", "value"], part.changes, numbers=False))
    for title, rows in part.facts:
        yield _text_block(_table_text([title, ""], rows, numbers=False))


_ACTIVE = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&^])")
_LEADING = re.compile(r"^(\s*\d*)([-=.])(?=\s|$)")


class _BoldParser(HTMLParser):
    """Converts HTML to Markdown text with ``<b>`` as bold; other tags are dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "b":
            self.text.append("**")

    def handle_endtag(self, tag: str) -> None:
        if tag == "b":
            self.text.append("**")

    def handle_data(self, data: str) -> None:
        self.text.append(_escape(data))


def to_markdown(text: str | Markup) -> str:
    """Convert a report text to one line of Markdown."""
    if not isinstance(text, Markup):
        return _escape(text)
    parser = _BoldParser()
    parser.feed(str(text))
    parser.close()
    return "".join(parser.text)


def _escape(raw: str) -> str:
    line = re.sub(r"\s*\n\s*", " ", raw)
    return _LEADING.sub(r"\1\\\2", _ACTIVE.sub(r"\\\1", line))


def to_plain_text(text: str | Markup) -> str:
    """Convert a report text to plain text."""
    return text.striptags() if isinstance(text, Markup) else text


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True
) -> str:
    """Build a Markdown table of cells in Markdown.

    With ``numbers``, all columns but the first are right-aligned.
    """
    alignment = "---:" if numbers else ":---"
    lines = [heads, [":---", *([alignment] * (len(heads) - 1))], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_list(lines: Sequence[str | Markup]) -> str:
    """Build a Markdown list of report texts."""
    return "\n".join(f"- {to_markdown(line)}" for line in lines)


def fenced_block(code: str) -> str:
    """Wrap a command or log lines in a code fence."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{code}\n{fence}"


def markdown_link(text: str, url: str) -> str:
    """Build a Markdown link to an http(s) URL."""
    return f"[{to_markdown(text)}](<{url.replace('<', '%3C').replace('>', '%3E')}>)"
