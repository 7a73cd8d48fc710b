"""Charts of the HTML report: stacked bars and curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from scalewise.reports import number_format
from scalewise.reports.chart_layout import (
    GREY,
    INK,
    NARROW,
    PAGE,
    ChartDrawing,
    ChartSheet,
    build_axis,
    build_frame,
    round_ticks,
    spread_labels,
    text_width,
)

_LABEL_GAP = 15


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar."""

    color: str
    """CSS variable."""
    length: float
    """Length in the chart's unit."""
    tip: str
    """Tooltip."""


@dataclass(frozen=True)
class StackedBar:
    """A stacked bar with its name and number."""

    name: str
    """Label of the bar."""
    segments: tuple[BarSegment, ...]
    """Segments from the origin."""
    number: str
    """Text next to the bar."""
    predicted: float | None = None
    """Predicted length, drawn as a tick."""
    error: str = ""
    """Prediction error or change, after the number."""


@dataclass(frozen=True)
class CurveLine:
    """A curve over the steps."""

    points: tuple[tuple[float, float], ...]
    """Step and value of each point."""
    label: str
    """Text at the end of the curve; empty for none."""
    color: str = "--c-0"
    """CSS variable of the curve."""
    label_color: str = "--ct-0"
    """CSS variable of the label."""
    tip: str = ""
    """Tooltip."""
    faint: bool = False
    """Whether the curve is drawn thin and grey."""
    dots: bool = False
    """Whether points are marked."""


def draw_stacks(
    bars: Sequence[StackedBar],
    width: int,
    limit: tuple[float, str] | None = None,
    span: float = 0.0,
) -> ChartDrawing:
    """Draw stacked bars in the given order, with columns for number and error.

    Args:
        bars: Bars from top to bottom.
        width: Width in pixels; ``NARROW`` puts the names above the bars.
        limit: Position and label of a dashed line.
        span: Minimum end of the axis.
    """
    sheet, narrow = ChartSheet(), width == NARROW
    row, thick = (40, 15) if narrow else (34, 20)
    error_texts = [bar.error for bar in bars if bar.error and not narrow]
    errors = text_width(error_texts, 70) + 6 if error_texts else 0
    column = text_width([bar.number for bar in bars], 110) + errors
    left = 1 if narrow or not any(b.name for b in bars) else text_width([b.name for b in bars], 240)
    right = 10 if narrow else column + 8
    inner = width - left - right
    ends = [sum(s.length for s in bar.segments) for bar in bars]
    ends += [bar.predicted for bar in bars if bar.predicted is not None]
    longest = max([*ends, limit[0] if limit else 0, span]) or 1.0
    tick_values = round_ticks(0, longest, 4 if narrow else 6)
    rows, texts, ticks = [], [], []
    for index, bar in enumerate(bars):
        top = index * row + (row - thick - 3 if narrow else (row - thick) / 2)
        end = 0.0
        for part in bar.segments:
            rows.append({"a": end, "b": end + part.length, "y": top, "z": top + thick,
                         "c": f"var({part.color})", "tip": part.tip})  # fmt: skip
            end += part.length
        if bar.predicted is not None:
            overhang = 0 if narrow else 3
            ticks.append({"x": bar.predicted, "y": top - overhang, "z": top + thick + 3})
        number_text = f"{bar.number}, {bar.error}" if narrow and bar.error else bar.number
        texts.append({"y": top - 9 if narrow else top + thick / 2, "name": bar.name,
                      "number": number_text, "error": bar.error})  # fmt: skip
    height = len(bars) * row
    scale = alt.Scale(domain=[0, longest], nice=False, zero=True)
    grid = build_axis(tick_values, grid=True)
    down = alt.Scale(domain=[0, height], range=[0, height], nice=False)
    rects = (
        sheet.chart(rows)
        .mark_rect(opacity=1, stroke=PAGE, strokeWidth=1)
        .encode(
            x=alt.X("a:Q", scale=scale, axis=grid),
            x2="b:Q",
            y=alt.Y("y:Q", scale=down, axis=None),
            y2="z:Q",
            color=alt.Color("c:N", scale=None, legend=None),
            description="tip:N",
        )
    )
    layers = [rects]
    if ticks:
        across = alt.X("x:Q", scale=scale, axis=grid)
        encoding = {"x": across, "y": alt.Y("y:Q", scale=down, axis=None), "y2": "z:Q"}
        layers += [
            sheet.chart(ticks).mark_rule(color=color, strokeWidth=thick_line, opacity=1)
            .encode(**encoding)
            for color, thick_line in ((PAGE, 5), (INK, 2))
        ]  # fmt: skip
    if limit:
        layers += _limit_layer(sheet, limit, alt.X("x:Q", scale=scale, axis=grid))
    text_y = alt.Y("y:Q", scale=down, axis=None)
    base = sheet.chart(texts)
    layers.append(base.mark_text(
        align="left" if narrow else "right", baseline="middle", fontSize=13, color=INK,
        limit=inner - column if narrow else left - 8,
    ).encode(x=alt.value(0 if narrow else -8), y=text_y, text="name:N"))  # fmt: skip
    size = 12 if narrow else 13
    number_x = inner if narrow else inner + right - errors
    text_mark = base.mark_text(align="right", baseline="middle", fontSize=size, color=INK)
    layers.append(text_mark.encode(x=alt.value(number_x), y=text_y, text="number:N"))
    if error_texts:
        text_mark = base.mark_text(align="right", baseline="middle", fontSize=size, color=GREY)
        layers.append(text_mark.encode(x=alt.value(inner + right), y=text_y, text="error:N"))
    return build_frame(sheet, layers, width, height, (left, right, 18 if limit else 2, 24))


def _limit_layer(sheet: ChartSheet, limit: tuple[float, str], x: alt.X) -> list[alt.Chart]:
    chart = sheet.chart([{"x": limit[0], "t": limit[1]}])
    rule = chart.mark_rule(color=INK, strokeDash=[3, 3], opacity=1).encode(x=x)
    text = chart.mark_text(align="right", baseline="bottom", dy=-4, dx=4, fontSize=12, color=GREY)
    return [rule, text.encode(x=x, y=alt.value(0), text="t:N")]


def draw_curves(
    lines: Sequence[CurveLine],
    width: int,
    *,
    log: bool = False,
    bound: float | None = None,
    zero: bool = False,
    note: str = "",
    side_note: str = "",
    height: int = 190,
) -> ChartDrawing:
    """Draw curves over the step, with labels at their ends.

    Args:
        lines: The curves.
        width: Width in pixels.
        log: Whether the vertical axis is logarithmic; all values must be positive.
        bound: Position of a horizontal dashed line.
        zero: Whether the vertical axis includes 0.
        note: A single label in place of one per curve.
        side_note: A text that the right margin must fit, so that panels align.
        height: Minimum height in pixels.
    """
    sheet, narrow = ChartSheet(), width == NARROW
    points = [point for line in lines for point in line.points]
    named = [line for line in lines if line.label]
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    y_low, y_high = min(p[1] for p in points), max(p[1] for p in points)
    scale, ticks = _vertical_scale(y_low, y_high, log=log, bound=bound, zero=zero)
    height = max(height, _LABEL_GAP * len(named) + 10)
    left = 46 if narrow else 56
    right = max(
        text_width([*(line.label for line in named), note, side_note], 128 if narrow else 250), 14
    )
    inner = width - left - right
    across = alt.Scale(domain=[x_low, max(x_high, x_low + 1)], nice=False, zero=False)
    steps = [
        x_low,
        *(
            t
            for t in round_ticks(x_low, x_high, 3 if narrow else 5)
            if t - x_low > (x_high - x_low) / 12
        ),
    ]
    x = alt.X("x:Q", scale=across, axis=build_axis(steps, grid=False, title="step"))
    y = alt.Y("y:Q", scale=scale, axis=build_axis(ticks, grid=True, log=log))
    layers = [*_line_layers(sheet, lines, x, y), *_dots_layer(sheet, lines, x, y)]
    if bound is not None:
        layers += _bound_layer(sheet, bound, y)
    positions = [_position_of(line.points[-1][1], scale) * height for line in named]
    ends = zip(named, spread_labels(positions, _LABEL_GAP, 4, height - 4), strict=True)
    labels = [(line.label, f"var({line.label_color})", spot) for line, spot in ends]
    if note:
        last = [line.points[-1][1] for line in lines]
        labels = [(note, INK, _position_of(sum(last) / len(last), scale) * height)]
    if labels:
        rows = [{"t": t, "c": c, "y": _number_at(spot / height, scale)} for t, c, spot in labels]
        text = sheet.chart(rows).mark_text(
            align="left", baseline="middle", fontSize=12, limit=right - 8
        )
        ink = alt.Color("c:N", scale=None, legend=None)
        layers.append(text.encode(x=alt.value(inner + 8), y=y, text="t:N", color=ink))
    return build_frame(sheet, layers, width, height, (left, right, 6, 38))


def _line_layers(
    sheet: ChartSheet, lines: Sequence[CurveLine], x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    """Layer of faint lines, if there are any, below the layer of the others."""
    layers = []
    for faint in (True, False):
        rows = [
            {"x": step, "y": number, "line": index,
             **({} if faint else {"c": f"var({line.color})", "tip": line.tip})}
            for index, line in enumerate(lines)
            if line.faint is faint
            for step, number in line.points
        ]  # fmt: skip
        chart = sheet.chart(rows)
        if rows and faint:
            mark = chart.mark_line(color="var(--faint)", strokeWidth=1, opacity=1)
            layers.append(mark.encode(x=x, y=y, detail="line:N"))
        elif rows:
            mark = chart.mark_line(strokeWidth=1.5, strokeJoin="round", opacity=1)
            layers.append(mark.encode(
                x=x, y=y, detail="line:N", color=alt.Color("c:N", scale=None, legend=None),
                description="tip:N",
            ))  # fmt: skip
    return layers


def _dots_layer(
    sheet: ChartSheet, lines: Sequence[CurveLine], x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    rows = [
        {"x": step, "y": number, "c": f"var({line.color})", "tip": line.tip}
        for line in lines
        if line.dots and not line.faint
        for step, number in line.points
    ]
    if not rows:
        return []
    spots = sheet.chart(rows).mark_point(
        filled=True, size=34, stroke=PAGE, strokeWidth=1, opacity=1
    )
    fill = alt.Fill("c:N", scale=None, legend=None)
    return [spots.encode(x=x, y=y, fill=fill, description="tip:N")]


def _bound_layer(sheet: ChartSheet, bound: float, y: alt.Y) -> list[alt.Chart]:
    rule = sheet.chart([{"y": bound}]).mark_rule(color=INK, strokeDash=[3, 3], opacity=1)
    text = sheet.chart(
        [{"y": bound, "t": f"bound 1e{number_format.MINUS}{-round(math.log10(bound))}"}]
    ).mark_text(align="left", baseline="bottom", dy=-3, fontSize=12, color=GREY)
    return [rule.encode(y=y), text.encode(x=alt.value(6), y=y, text="t:N")]


def _vertical_scale(
    low: float, high: float, *, log: bool, bound: float | None, zero: bool
) -> tuple[alt.Scale, list[float]]:
    if log:
        ends = [low, high, *([bound] if bound else [])]
        first, last = math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends)))
        last = max(last, first + 1)
        stride = max(1, round((last - first) / 4))
        ticks = [10.0**power for power in range(first, last + 1, stride)]
        return alt.Scale(type="log", domain=[10.0**first, 10.0**last], nice=False), ticks
    low = min(low, 0.0) if zero else low
    slack = (high - low or abs(high) or 1) * 0.06
    bottom = low if zero and low == 0 else low - slack
    return (
        alt.Scale(type="linear", domain=[bottom, high + slack], nice=False, zero=False),
        round_ticks(bottom, high + slack, 4),
    )


def _position_of(number: float, scale: alt.Scale) -> float:
    """Position of ``number`` from the top of ``scale``, as a fraction of the height."""
    low, high = scale["domain"]
    if scale["type"] == "log":
        low, high, number = math.log10(low), math.log10(high), math.log10(number)
    return float((high - number) / (high - low))


def _number_at(fraction: float, scale: alt.Scale) -> float:
    """Inverse of :func:`_position_of`."""
    low, high = scale["domain"]
    if scale["type"] == "log":
        return float(10 ** (math.log10(high) - fraction * math.log10(high / low)))
    return float(high - fraction * (high - low))
