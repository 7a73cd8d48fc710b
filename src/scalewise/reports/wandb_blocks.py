"""Renders an outline as the blocks of a W&B report: headings, Markdown and panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import wandb_workspaces.reports.v2 as wr

from scalewise.reports import markdown, wandb_panels
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

COLUMNS = 24
"""Width of a panel grid, in its own unit."""
HEIGHT = 8
"""Height of a panel, in the same."""


class ReportBlocks:
    """The blocks of one report. ``runs`` says which runs its panels draw; None: there are none."""

    def __init__(self, runs: str | None) -> None:
        self._runs, self._grids, self._panels = runs, 0, 0

    def build(self, report: ReportModel) -> Iterator[Any]:
        """Yields the report's head, then its parts."""
        yield _text_block(markdown.to_markdown(report.verdict))
        facts = [
            f"**{markdown.to_markdown(name)}** {markdown.to_markdown(text)}"
            for name, text in report.facts
        ]
        yield _text_block("  \n".join(facts))
        if report.record.command:
            yield _text_block(markdown.fenced_block(report.record.command))
        yield wr.TableOfContents()
        for part in report.parts:
            yield wr.H2(text=f"{part.topic}. {markdown.to_plain_text(part.finding)}")
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
            yield from self._grid_blocks(part.live)
        else:
            yield from self._iter_section_blocks(part)

    def _iter_section_blocks(self, part: ReportSection) -> Iterator[Any]:
        if part.said:
            yield _text_block(markdown.markdown_list(part.said))
        yield from self._grid_blocks(part.live)
        if part.notes:
            yield _text_block("\n\n".join(markdown.to_markdown(note) for note in part.notes))
        if part.numbers:
            heads = [part.numbers.corner, *part.numbers.heads]
            rows = [[name, *cells] for name, cells in part.numbers.rows]
            yield _text_block(_table_block(heads, rows))

    def _grid_blocks(self, drawn: Sequence[TitledPanel]) -> Iterator[Any]:
        """Yields the panels side by side, where W&B holds runs for them to draw."""
        if not drawn or self._runs is None:
            return
        self._grids += 1
        runset = wr.Runset(
            name="Runs", filters=self._runs, order=[wr.OrderBy("CreatedTimestamp", ascending=True)]
        )
        runset._id = f"runs{self._grids}"  # else drawn by chance, and no two builds alike
        wide = COLUMNS if len(drawn) == 1 else COLUMNS // 2
        panels = []
        for place, one in enumerate(drawn):
            layout = wr.Layout(
                x=place * wide % COLUMNS, y=place * wide // COLUMNS * HEIGHT, w=wide, h=HEIGHT
            )
            self._panels += 1
            panels.append(build_panel(one, layout=layout))
            panels[-1]._id = f"panel{self._panels}"
        yield wr.PanelGrid(runsets=[runset], panels=panels, hide_run_sets=self._grids > 1)


def build_panel(titled_panel: TitledPanel, **layout: Any) -> Any:
    """Returns the panel; ``layout`` is its ``layout`` in a grid, if it stands in one."""
    what, title = titled_panel.panel, titled_panel.title
    if isinstance(what, wandb_panels.CurvesPanel):
        return wr.LinePlot(
            title=title,
            x="step",
            y=list(what.metrics),
            range_y=(0, None) if what.from_zero else (None, None),
            plot_type="stacked-area" if what.stacked else "line",
            **layout,
        )
    if isinstance(what, wandb_panels.BarsPanel):
        return wr.BarPlot(title=title, metrics=[what.number.name], **layout)
    if isinstance(what, wandb_panels.ScatterPanel):
        colour = _column_key(what.colour) if what.colour else None
        return wr.ScatterPlot(
            title=title, x=_column_key(what.x), y=_column_key(what.y), z=colour, **layout
        )
    if isinstance(what, wandb_panels.CoordinatesPanel):
        columns = [
            wr.ParallelCoordinatesPlotColumn(metric=_column_key(axis), display_name=label)
            for axis, label in what.axes
        ]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns, **layout)
    if isinstance(what, wandb_panels.ImportancePanel):
        return wr.ParameterImportancePlot(with_respect_to=what.target.name, **layout)
    return wr.RunComparer(diff_only=True, **layout)


def _column_key(axis: wandb_panels.RunSetting | wandb_panels.SummaryNumber) -> Any:
    kind = wr.Config if isinstance(axis, wandb_panels.RunSetting) else wr.SummaryMetric
    return kind(axis.name)


def run_set_filter(group: str, ids: Sequence[str]) -> str | None:
    """Returns the filter of a run set: a group, else runs by id; None where W&B holds none."""
    if group:
        return f"Metric('Group') == {group!r}"  # read as Python: repr quotes what a name may hold
    return f"Metric('ID') in {list(ids)!r}" if ids else None


def _text_block(text: str) -> Any:
    return wr.MarkdownBlock(text=text)


def _table_block(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True
) -> str:
    of = markdown.to_markdown
    return markdown.markdown_table(
        [of(head) for head in heads], [[of(c) for c in row] for row in rows], numbers=numbers
    )


def _varied_blocks(part: VariedPart) -> Iterator[Any]:
    for matrix in part.matrices:
        heads = [matrix.down, *(f"{matrix.across}={c}" if matrix.across else "" for c in
                                matrix.columns)]  # fmt: skip
        rows = [
            [
                name,
                *("; ".join(_outcome_blocks(*one) for one in cell) or "no job" for cell in cells),
            ]
            for name, cells in matrix.rows
        ]
        title = f"{markdown.to_markdown(matrix.title)}\n\n" if matrix.title else ""
        yield _text_block(title + _table_block(heads, rows, numbers=False))
    if part.notes:
        yield _text_block("\n\n".join(markdown.to_markdown(note) for note in part.notes))


def _outcome_blocks(status: str, text: str) -> str:
    word = "ok on retry" if status == "retried" else status_word(status)
    return text if text == word else f"{word}: {text}"


def _compared_blocks(part: ComparedPart) -> Iterator[Any]:
    heads = ["job", "ended", *(column.label for column in part.columns)]
    rows = []
    for place, job in enumerate(part.rows):
        cells = [column.cells[place] for column in part.columns]
        texts = [
            f"**{markdown.to_markdown(c.text)}**" if c.best else markdown.to_markdown(c.text)
            for c in cells
        ]
        rows.append(
            [
                markdown.to_markdown(job.name),
                markdown.to_markdown(status_word(job.run.status)),
                *texts,
            ]
        )
    yield _text_block(markdown.markdown_table([markdown.to_markdown(head) for head in heads], rows))
    yield _text_block(
        markdown.to_markdown(" ".join(("Bold is the best of those that finished.", *part.notes)))
    )


def _failed_blocks(part: FailedPart) -> Iterator[Any]:
    for card in part.cards:
        yield _text_block("\n\n".join(_section_blocks(card)))
    if part.more:
        rows = [[card.name, status_word(card.status), card.reason] for card in part.more]
        yield _text_block(_table_block(["job", "ended", "reason"], rows, numbers=False))


def _section_blocks(card: FailureCard) -> Iterator[str]:
    of, where = markdown.to_markdown, f" ({card.where})" if card.where else ""
    yield f"**{of(card.name)}, {of(status_word(card.status))}**{of(where)}"
    if card.reason:
        yield of(card.reason)
    if card.same:
        yield of(f"{len(card.same)} more ended the same way: {'; '.join(card.same)}.")
    if card.log:
        yield markdown.fenced_block("\n".join(card.log))
    for override, why in card.cures:
        yield f"{of(why)}\n\n{markdown.fenced_block(override)}"
    if card.command and not card.cures:
        yield markdown.fenced_block(card.command)


def _reproduce_blocks(part: ReproducePart) -> Iterator[Any]:
    for why, command in part.commands:
        yield _text_block(f"{markdown.to_markdown(why)}\n\n{markdown.fenced_block(command)}")
    if part.links:
        yield _text_block(
            "\n".join(f"- {markdown.markdown_link(name, url)}" for name, url in part.links)
        )
    if part.changes:
        yield _text_block(_table_block(["key", "default", "here"], part.changes, numbers=False))
    for title, rows in part.facts:
        yield _text_block(_table_block([title, ""], rows, numbers=False))
