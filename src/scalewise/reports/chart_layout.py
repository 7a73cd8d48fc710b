"""What all charts share: two widths, round ticks, room for text, axes and the frame.

A chart is laid out in pixels here, not by the renderer, whose text widths are not the reader's:
room for names and numbers is set aside by counting characters, with slack.
"""

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import altair as alt

from scalewise.failures import describe_exception
from scalewise.reports import number_format, svg

WIDE, NARROW = 780, 328
INK, GREY, GRID, PAGE = "var(--ink)", "var(--ink2)", "var(--grid)", "var(--bg)"
NO_CHART = "This chart could not be drawn"
CHARACTER = 7.0
"""Pixels that a character of a name takes, on the safe side."""


@dataclass(frozen=True)
class ChartSheet:
    """The rows of a drawing by name, kept beside its grammar, which the schema then checks fast."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def chart(self, rows: Sequence[dict[str, Any]]) -> alt.Chart:
        """Returns a chart of ``rows``; its encodings name their types."""
        name = f"rows{len(self.tables)}"
        self.tables[name] = list(rows)
        return alt.Chart(alt.NamedData(name=name))


@dataclass(frozen=True)
class ChartDrawing:
    """A chart in its frame with the rows it draws."""

    chart: alt.LayerChart
    sheet: ChartSheet


@dataclass(frozen=True)
class ChartPicture:
    """One chart for two widths, drawn when the page asks; it shows the one that fits."""

    draw: Callable[[int], ChartDrawing]
    ident: str
    sentence: str

    @property
    def wide(self) -> str:
        """Returns the SVG for a desk."""
        return self._rendered(WIDE)

    @property
    def narrow(self) -> str:
        """Returns the SVG for a phone."""
        return self._rendered(NARROW)

    def _rendered(self, width: int) -> str:
        try:
            made = self.draw(width)
            return svg.render_svg(
                made.chart, made.sheet.tables, f"{self.ident}-{width}", self.sentence
            )
        except Exception as error:  # the report stands without a chart
            return f"<p>{NO_CHART}: {html.escape(describe_exception(error))}</p>"


def draw_both_widths(
    draw: Callable[[int], ChartDrawing], ident: str, sentence: str
) -> ChartPicture:
    """Returns what ``draw`` gives for both widths; ``sentence`` says what it shows."""
    return ChartPicture(draw, ident, sentence)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about ``count`` round numbers (1, 2 or 5 times a power of ten) in ``[low, high]``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(place * step, digits) for place in range(first, last + 1)]


def spread_labels(positions: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Returns ``positions`` moved as little as needed to stand ``gap`` apart within the bounds."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = [min(max(p, top), bottom) for p in positions]
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + gap)
    limit = bottom
    for place in reversed(order):
        moved[place] = min(moved[place], limit)
        limit = moved[place] - gap
    return moved


def text_width(texts: Sequence[str], most: int) -> int:
    """Returns the pixels that the longest of ``texts`` takes, at most ``most``."""
    return min(most, round(max((len(text) for text in texts), default=0) * CHARACTER) + 12)


def build_axis(
    values: Sequence[float], *, grid: bool, log: bool = False, title: str | None = None
) -> alt.Axis:
    """Returns an axis with ticks at ``values``, written as the page writes numbers."""
    digits = max((len(f"{v:.10f}".rstrip("0").split(".")[1]) for v in values), default=0)
    tiny = 0 < max(map(abs, values), default=0) < 1e-3
    texts = [
        number_format.format_power(v) if tiny else number_format.format_fixed(v, digits)
        for v in values
    ]
    if log:
        texts = [f"1e{round(math.log10(v))}".replace("-", number_format.MINUS) for v in values]
    label = f"{json.dumps(texts)}[indexof({json.dumps(list(values))}, datum.value)]"
    return alt.Axis(values=list(values), labelExpr=label, grid=grid, title=title,
                    titleAnchor="start", titleAlign="left", titleX=0, titleY=31)  # fmt: skip


def build_frame(
    sheet: ChartSheet,
    layers: Sequence[alt.Chart],
    width: int,
    height: int,
    pads: tuple[int, int, int, int],
) -> ChartDrawing:
    """Returns ``layers`` in one plot; ``pads`` are the pixels left, right, above and below it."""
    left, right, top, bottom = pads
    padding = {"left": left, "right": right, "top": top, "bottom": bottom}
    chart = alt.layer(*layers).properties(
        width=width - left - right,
        height=height,
        padding=padding,
        autosize=alt.AutoSizeParams(type="none"),
        background="transparent",
    )
    themed = chart.configure_view(stroke=None).configure_axis(
        labelColor=GREY, titleColor=GREY, labelFontSize=12, titleFontSize=12,
        titleFontWeight="normal", gridColor=GRID, domain=False, ticks=False, labelPadding=6,
        labelFlush=False,
    )  # fmt: skip
    return ChartDrawing(themed, sheet)
