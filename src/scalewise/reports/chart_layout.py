"""Layout shared by all charts: two widths, ticks, text widths, axes and the frame.

Charts are laid out in pixels here, because the text widths of the renderer differ from those of
the browser: space for names and numbers is estimated from character counts, with a margin.
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
CHARACTER_WIDTH = 7.0
"""Upper estimate of the width of a character, in pixels."""


@dataclass(frozen=True)
class ChartSheet:
    """Data tables of a chart, stored outside its spec so that schema validation is fast."""

    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows by table name."""

    def chart(self, rows: Sequence[dict[str, Any]]) -> alt.Chart:
        """Chart of ``rows``; its encodings must declare their types."""
        name = f"rows{len(self.tables)}"
        self.tables[name] = list(rows)
        return alt.Chart(alt.NamedData(name=name))


@dataclass(frozen=True)
class ChartDrawing:
    """A framed chart and its data."""

    chart: alt.LayerChart
    """The chart."""
    sheet: ChartSheet
    """Its data tables."""


@dataclass(frozen=True)
class ChartPicture:
    """A chart in two widths, rendered on access; CSS shows the one that fits the screen."""

    draw: Callable[[int], ChartDrawing]
    """Draws the chart for a width in pixels."""
    anchor: str
    """Id of the chart on the page."""
    sentence: str
    """Description for screen readers."""

    @property
    def desktop_svg(self) -> str:
        """SVG for a desktop screen."""
        return self._render(WIDE)

    @property
    def mobile_svg(self) -> str:
        """SVG for a phone."""
        return self._render(NARROW)

    def _render(self, width: int) -> str:
        try:
            drawing = self.draw(width)
            return svg.render_svg(
                drawing.chart, drawing.sheet.tables, f"{self.anchor}-{width}", self.sentence
            )
        except Exception as error:  # a failed chart must not prevent the report
            return f"<p>{NO_CHART}: {html.escape(describe_exception(error))}</p>"


def draw_both_widths(
    draw: Callable[[int], ChartDrawing], anchor: str, sentence: str
) -> ChartPicture:
    """Chart of ``draw`` for both widths; ``sentence`` describes it to screen readers."""
    return ChartPicture(draw, anchor, sentence)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten) in ``[low, high]``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def spread_labels(positions: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Shift ``positions`` as little as needed so that they are ``gap`` apart within the bounds."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    shifted = [min(max(p, top), bottom) for p in positions]
    for above, below in pairwise(order):
        shifted[below] = max(shifted[below], shifted[above] + gap)
    limit = bottom
    for index in reversed(order):
        shifted[index] = min(shifted[index], limit)
        limit = shifted[index] - gap
    return shifted


def text_width(texts: Sequence[str], max_width: int) -> int:
    """Width in pixels of the longest of ``texts``, at most ``max_width``."""
    longest = max((len(text) for text in texts), default=0)
    return min(max_width, round(longest * CHARACTER_WIDTH) + 12)


def build_axis(
    values: Sequence[float], *, grid: bool, log: bool = False, title: str | None = None
) -> alt.Axis:
    """Axis with ticks at ``values``, in the number format of the report."""
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
    """Combine ``layers`` in one plot; ``pads`` are the left, right, top and bottom margins."""
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
