"""Scatter plot of two metrics with the Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from scalewise.reports.chart_layout import (
    CHARACTER_WIDTH,
    GREY,
    INK,
    NARROW,
    ChartDrawing,
    ChartSheet,
    build_axis,
    build_frame,
    round_ticks,
)


@dataclass(frozen=True)
class TradeoffMark:
    """A job in the scatter plot."""

    name: str
    """Label of the point."""
    x: float
    """Horizontal value."""
    y: float
    """Vertical value."""
    color: str
    """CSS variable."""
    shape: str
    """Vega shape."""
    tip: str
    """Tooltip."""
    front: bool
    """Whether the job is on the Pareto front."""


def draw_tradeoff(marks: Sequence[TradeoffMark], width: int, title: str) -> ChartDrawing:
    """Draw a scatter plot of two metrics to be minimized, with the Pareto front as a staircase."""
    sheet, narrow = ChartSheet(), width == NARROW
    left, right, height = 46, 16, 250 if narrow else 280
    bounds = []
    for ends, slack in (([m.x for m in marks], 0.16), ([m.y for m in marks], 0.14)):
        extent = (max(ends) - min(ends)) or max(ends) or 1
        bounds.append((max(min(ends) - slack * extent, 0), max(ends) + slack * extent))
    (x_low, x_high), (y_low, y_high) = bounds
    wide_scale = alt.Scale(domain=[x_low, x_high], nice=False, zero=False)
    tall_scale = alt.Scale(domain=[y_low, y_high], nice=False, zero=False)
    marks_x = round_ticks(x_low, x_high, 4 if narrow else 6)
    x = alt.X("x:Q", scale=wide_scale, axis=build_axis(marks_x, grid=False, title=title))
    y = alt.Y("y:Q", scale=tall_scale, axis=build_axis(round_ticks(y_low, y_high, 4), grid=True))
    front = sorted((m for m in marks if m.front), key=lambda m: m.x)
    staircase = [{"x": front[0].x, "y": y_high}, *({"x": m.x, "y": m.y} for m in front)]
    staircase.append({"x": x_high, "y": front[-1].y})
    line = sheet.chart(staircase).mark_line(
        interpolate="step-after", color=GREY, strokeWidth=1, opacity=1
    )
    rows = [{"x": m.x, "y": m.y, "c": f"var({m.color})", "s": m.shape, "tip": m.tip} for m in marks]
    spots = sheet.chart(rows).mark_point(filled=True, size=95, opacity=1, stroke=INK, strokeWidth=1)
    layers = [line.encode(x=x, y=y), spots.encode(
        x=x, y=y, fill=alt.Fill("c:N", scale=None, legend=None),
        shape=alt.Shape("s:N", scale=None, legend=None), description="tip:N")]  # fmt: skip
    inner = width - left - right
    occupied: list[tuple[float, float, float, float]] = []
    spans = [(m, (m.x - x_low) / (x_high - x_low) * inner,
              (y_high - m.y) / (y_high - y_low) * height) for m in marks]  # fmt: skip
    occupied += [(across - 6, down - 6, across + 6, down + 6) for _, across, down in spans]
    names: dict[tuple[bool, bool], list[dict[str, Any]]] = {}
    for mark, across, down in sorted(spans, key=lambda one: not one[0].front):
        offset = _place_label(mark, across, down, inner, occupied)
        if offset is not None:
            start, middle = across + offset[0], down + offset[1]
            row = {"x": x_low + start / inner * (x_high - x_low),
                  "y": y_high - middle / height * (y_high - y_low), "t": mark.name}  # fmt: skip
            names.setdefault((offset[0] < 0, mark.front), []).append(row)
    for (leftward, front_name), rows in names.items():
        text = sheet.chart(rows).mark_text(
            align="right" if leftward else "left", baseline="middle", fontSize=12,
            fontWeight=600 if front_name else 400, color=INK if front_name else GREY,
        )  # fmt: skip
        layers.append(text.encode(x=x, y=y, text="t:N"))
    return build_frame(sheet, layers, width, height, (left, right, 6, 38))


def _place_label(
    mark: TradeoffMark,
    across: float,
    down: float,
    inner: float,
    occupied: list[tuple[float, float, float, float]],
) -> tuple[int, int] | None:
    """Offset of a label from its point, and reserve its box; ``None`` if there is no room.

    Labels of the Pareto front go to the lower left, where no other job can be, and the others to
    the upper right. A negative horizontal offset is the right end of the label.
    """
    text_length = len(mark.name) * CHARACTER_WIDTH
    first = [(-9, 11), (9, 11)] if mark.front else [(9, -10), (-9, -10)]
    for dx, dy in [*first, *((a, -b) for a, b in first)]:
        start = across + dx - (text_length if dx < 0 else 0)
        box = (start, down + dy - 7, start + text_length, down + dy + 7)
        fits = start > -30 and start + text_length < inner + 16
        is_free = all(
            box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in occupied
        )
        if fits and is_free:
            occupied.append(box)
            return dx, dy
    return None
