"""Renders an outline as the blocks of a W&B report: headings, Markdown and panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import wandb_workspaces.reports.v2 as wr

from scalewise.reports import live, markdown
from scalewise.reports.findings import status_word
from scalewise.reports.live import Drawn
from scalewise.reports.outline import Compared, Failed, Outline, Part, Repeat, Varied
from scalewise.reports.overview import Card
from scalewise.reports.sections import Section

COLUMNS = 24
"""Width of a panel grid, in its own unit."""
HEIGHT = 8
"""Height of a panel, in the same."""


class Blocks:
    """The blocks of one report. ``runs`` says which runs its panels draw; None: there are none."""

    def __init__(self, runs: str | None) -> None:
        self._runs, self._grids, self._panels = runs, 0, 0

    def of(self, report: Outline) -> Iterator[Any]:
        """Yields the report's head, then its parts."""
        yield _text(markdown.of(report.verdict))
        facts = [f"**{markdown.of(name)}** {markdown.of(text)}" for name, text in report.facts]
        yield _text("  \n".join(facts))
        if report.record.command:
            yield _text(markdown.fenced(report.record.command))
        yield wr.TableOfContents()
        for part in report.parts:
            yield wr.H2(text=f"{part.topic}. {markdown.plain(part.finding)}")
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[Any]:
        if isinstance(part, Varied):
            yield from _varied(part)
        elif isinstance(part, Compared):
            yield from _compared(part)
        elif isinstance(part, Failed):
            yield from _failed(part)
        elif isinstance(part, Repeat):
            yield from _repeat(part)
            yield from self._grid(part.live)
        else:
            yield from self._section(part)

    def _section(self, part: Section) -> Iterator[Any]:
        if part.said:
            yield _text(markdown.listed(part.said))
        yield from self._grid(part.live)
        if part.notes:
            yield _text("\n\n".join(markdown.of(note) for note in part.notes))
        if part.numbers:
            heads = [part.numbers.corner, *part.numbers.heads]
            rows = [[name, *cells] for name, cells in part.numbers.rows]
            yield _text(_table(heads, rows))

    def _grid(self, drawn: Sequence[Drawn]) -> Iterator[Any]:
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
            panels.append(panel(one, layout=layout))
            panels[-1]._id = f"panel{self._panels}"
        yield wr.PanelGrid(runsets=[runset], panels=panels, hide_run_sets=self._grids > 1)


def panel(drawn: Drawn, **where: Any) -> Any:
    """Returns the panel; ``where`` is its ``layout`` in a grid, if it stands in one."""
    what, title = drawn.what, drawn.title
    if isinstance(what, live.Curves):
        return wr.LinePlot(
            title=title,
            x="step",
            y=list(what.metrics),
            range_y=(0, None) if what.from_zero else (None, None),
            plot_type="stacked-area" if what.stacked else "line",
            **where,
        )
    if isinstance(what, live.Bars):
        return wr.BarPlot(title=title, metrics=[what.number.name], **where)
    if isinstance(what, live.Scatter):
        colour = _column(what.colour) if what.colour else None
        return wr.ScatterPlot(title=title, x=_column(what.x), y=_column(what.y), z=colour, **where)
    if isinstance(what, live.Coordinates):
        columns = [
            wr.ParallelCoordinatesPlotColumn(metric=_column(axis), display_name=label)
            for axis, label in what.axes
        ]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns, **where)
    if isinstance(what, live.Importance):
        return wr.ParameterImportancePlot(with_respect_to=what.target.name, **where)
    return wr.RunComparer(diff_only=True, **where)


def _column(axis: live.Setting | live.Summary) -> Any:
    kind = wr.Config if isinstance(axis, live.Setting) else wr.SummaryMetric
    return kind(axis.name)


def runs_of(group: str, ids: Sequence[str]) -> str | None:
    """Returns the filter of a run set: a group, else runs by id; None where W&B holds none."""
    if group:
        return f"Metric('Group') == {group!r}"  # read as Python: repr quotes what a name may hold
    return f"Metric('ID') in {list(ids)!r}" if ids else None


def _text(text: str) -> Any:
    return wr.MarkdownBlock(text=text)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    of = markdown.of
    return markdown.table(
        [of(head) for head in heads], [[of(c) for c in row] for row in rows], numbers=numbers
    )


def _varied(part: Varied) -> Iterator[Any]:
    for matrix in part.matrices:
        heads = [matrix.down, *(f"{matrix.across}={c}" if matrix.across else "" for c in
                                matrix.columns)]  # fmt: skip
        rows = [
            [name, *("; ".join(_ended(*one) for one in cell) or "no job" for cell in cells)]
            for name, cells in matrix.rows
        ]
        title = f"{markdown.of(matrix.title)}\n\n" if matrix.title else ""
        yield _text(title + _table(heads, rows, numbers=False))
    if part.notes:
        yield _text("\n\n".join(markdown.of(note) for note in part.notes))


def _ended(status: str, text: str) -> str:
    word = "ok on retry" if status == "retried" else status_word(status)
    return text if text == word else f"{word}: {text}"


def _compared(part: Compared) -> Iterator[Any]:
    heads = ["job", "ended", *(column.label for column in part.columns)]
    rows = []
    for place, job in enumerate(part.rows):
        cells = [column.cells[place] for column in part.columns]
        texts = [f"**{markdown.of(c.text)}**" if c.best else markdown.of(c.text) for c in cells]
        rows.append([markdown.of(job.name), markdown.of(status_word(job.run.status)), *texts])
    yield _text(markdown.table([markdown.of(head) for head in heads], rows))
    yield _text(markdown.of(" ".join(("Bold is the best of those that finished.", *part.notes))))


def _failed(part: Failed) -> Iterator[Any]:
    for card in part.cards:
        yield _text("\n\n".join(_story(card)))
    if part.more:
        rows = [[card.name, status_word(card.status), card.reason] for card in part.more]
        yield _text(_table(["job", "ended", "reason"], rows, numbers=False))


def _story(card: Card) -> Iterator[str]:
    of, where = markdown.of, f" ({card.where})" if card.where else ""
    yield f"**{of(card.name)}, {of(status_word(card.status))}**{of(where)}"
    if card.reason:
        yield of(card.reason)
    if card.same:
        yield of(f"{len(card.same)} more ended the same way: {'; '.join(card.same)}.")
    if card.log:
        yield markdown.fenced("\n".join(card.log))
    for override, why in card.cures:
        yield f"{of(why)}\n\n{markdown.fenced(override)}"
    if card.command and not card.cures:
        yield markdown.fenced(card.command)


def _repeat(part: Repeat) -> Iterator[Any]:
    for why, command in part.commands:
        yield _text(f"{markdown.of(why)}\n\n{markdown.fenced(command)}")
    if part.links:
        yield _text("\n".join(f"- {markdown.link(name, url)}" for name, url in part.links))
    if part.changes:
        yield _text(_table(["key", "default", "here"], part.changes, numbers=False))
    for title, rows in part.facts:
        yield _text(_table([title, ""], rows, numbers=False))
