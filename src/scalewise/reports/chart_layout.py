"""Layout shared by all charts (two widths, ticks, text widths, axes, frame) and rendering as SVG.

Charts are laid out in pixels here, because the text widths of the renderer differ from those of
the browser: space for names and numbers is estimated from character counts, with a margin.

Charts use CSS variables as colors, so that one SVG serves the light and the dark theme. Vega counts
its ids per process: they are prefixed to be unique on the page. Roles and fonts on each mark
are dropped, as the page sets both once; the description of a mark becomes its ``data-tip``.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import altair as alt

from scalewise.failures import describe_exception
from scalewise.reports import number_format, renderer

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
            return render_svg(
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


_VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
_HEAD = re.compile(r"^<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")
_DROPPED_ATTRIBUTES = re.compile(
    r" (?:role|aria-roledescription|font-family|pointer-events|aria-hidden|stroke-miterlimit)"
    r"=\"[^\"]*\""
    r"| opacity=\"1\"| stroke-opacity=\"1\"| class=\"[^\"]*\""
)
_EMPTY_PATH = re.compile(r"<path(?=[^>]*? d=\"(?:M0,0h0v0h0Z)?\")[^>]*/>")
_BACKGROUND = re.compile(r"<path class=\"background\"[^>]*/>")
_EMPTY_GROUP = re.compile(r"<g(?: transform=\"translate\(0,0\)\")?>\s*</g>|<g></g>")
_TIP_LABEL = re.compile(r"(<(?:path|circle|rect|line)[^>]*?) aria-label=")
_OTHER_LABEL = re.compile(r" aria-label=\"[^\"]*\"")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
_GEOMETRY = re.compile(r" (?:d|transform|x|y|x2|y2|width|height|cx|cy|r)=\"[^\"]*\"")
_SURROGATE_PAIR = re.compile("[\ud800-\uf8ff\U00010000-\U0010ffff]")
_PRIVATE_USE_AREA = range(0xE000, 0xF900)
_REPLACEMENT = "\ufffd"
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)")


def render_svg(
    chart: alt.LayerChart, tables: Mapping[str, list[dict[str, Any]]], anchor: str, sentence: str
) -> str:
    """Render a chart as SVG text.

    Args:
        chart: The chart.
        tables: Its data tables by name.
        anchor: Prefix of the ids, unique on the page.
        sentence: Description for screen readers.
    """
    spec: dict[str, Any] = chart.to_dict() | {"datasets": dict(tables)}
    spec, restored = _replace_surrogate_pairs(spec)
    raw = renderer.svg(spec, _VERSION).translate(restored)
    head = _HEAD.match(raw)
    if head is None:
        raise AssertionError("the renderer's SVG has no viewBox")
    body = _EMPTY_PATH.sub("", _BACKGROUND.sub("", raw[head.end() :]))
    body = _DROPPED_ATTRIBUTES.sub("", body)
    body = _OTHER_LABEL.sub("", _TIP_LABEL.sub(r"\1 data-tip=", body))
    body = _GEOMETRY.sub(lambda match: _LONG_NUMBER.sub(_round_numbers, match[0]), body)
    body = _ID.sub(rf"\g<1>{anchor}-", body)
    while (shorter := _EMPTY_GROUP.sub("", body)) != body:
        body = shorter
    width = head[1].split()[2]
    return (
        f'<svg style="max-width:{width}px" role="img" aria-label="{html.escape(sentence)}"'
        f' viewBox="{head[1]}">{body}'
    )


def _replace_surrogate_pairs(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """Replace characters outside the basic plane, and return the table that restores them.

    Vega truncates a long label between the two UTF-16 units of an emoji and then fails to parse it.
    """
    replacements: dict[int, str] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {replaced(key): replaced(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(entry) for entry in value]
        return _SURROGATE_PAIR.sub(replacement, value) if isinstance(value, str) else value

    def replacement(match: re.Match[str]) -> str:
        character = ord(match[0])
        if character not in replacements and len(replacements) == len(_PRIVATE_USE_AREA):
            return _REPLACEMENT
        return replacements.setdefault(character, chr(_PRIVATE_USE_AREA[len(replacements)]))

    content = replaced(spec)
    surrogates = range(0xD800, 0xE000)
    return content, {
        ord(unit): _REPLACEMENT if character in surrogates else chr(character)
        for character, unit in replacements.items()
    }


def _round_numbers(match: re.Match[str]) -> str:
    text = f"{float(match[0]):.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
