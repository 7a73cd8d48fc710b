"""Log-log plot of measured collective times and the ring model, one panel per collective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from scalewise.bench.link_fit import CollectiveSample
from scalewise.parallelism.collective import RingLink
from scalewise.run_files import write_text

BLUE, ORANGE = "#1f4e8c", "#c9802b"
NAMES = {"send": "point to point"}
_BYTES = "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
_TIME = (
    "datum.value >= 1 ? datum.value + ' s' : datum.value >= 1e-3 ? "
    "format(datum.value * 1e3, '~r') + ' ms' : format(datum.value * 1e6, '~r') + ' us'"
)


def draw_collectives(
    samples: Sequence[CollectiveSample], link: RingLink | None, file: Path
) -> None:
    """Write an SVG with measured times as points and the ring model of ``link`` as lines."""
    spec: dict[str, Any] = collectives_chart(samples, link).to_dict()
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    write_text(file, vl_convert.vegalite_to_svg(spec, vl_version=version))


def collectives_chart(samples: Sequence[CollectiveSample], link: RingLink | None) -> alt.FacetChart:
    """Chart of time over size, with one panel per kind of collective."""
    rows: list[dict[str, Any]] = [
        {"kind": NAMES.get(s.kind, s.kind.replace("_", "-")), "bytes": s.bytes, "source": source,
         "s": seconds}
        for s in samples
        for source, seconds in (
            ("measured", s.seconds),
            *([("ring model", link.seconds(s.kind, s.ranks, s.bytes))] if link else []),
        )
    ]  # fmt: skip
    sizes = sorted({s.bytes for s in samples})
    x = alt.X(
        "bytes:Q",
        scale=alt.Scale(type="log", base=2, domain=[sizes[0] / 2, sizes[-1] * 2], nice=False),
        axis=alt.Axis(values=[sizes[0], sizes[len(sizes) // 2], sizes[-1]], labelExpr=_BYTES),
        title=None,
    )
    times = [row["s"] for row in rows]
    powers = [10.0**power for power in range(-7, 3)]
    ticks = [p for p in powers if min(times) / 10 <= p <= max(times) * 10]
    y = alt.Y(
        "s:Q",
        scale=alt.Scale(type="log", domain=[min(times) / 1.5, max(times) * 1.5], nice=False),
        axis=alt.Axis(values=ticks, labelExpr=_TIME),
        title="time per operation",
    )
    color = alt.Color(
        "source:N",
        scale=alt.Scale(domain=["measured", "ring model"], range=[BLUE, ORANGE]),
        legend=alt.Legend(orient="top", title=None),
    )
    base = alt.Chart().encode(x=x, y=y, color=color)
    layers = alt.layer(
        base.mark_line(strokeWidth=1.5).transform_filter("datum.source == 'ring model'"),
        base.mark_point(filled=True, size=36, opacity=1).transform_filter(
            "datum.source == 'measured'"
        ),
    ).properties(width=210, height=170)
    ranks = samples[0].ranks
    title = f"{ranks} ranks; noise hides the link"
    if link is not None:
        latency, rate = f"{link.latency_s * 1e6:.3g} us", f"{link.bytes_per_s / 1e9:.3g} GB/s"
        title = f"{ranks} ranks on a ring of links with {latency} and {rate}"
    panels = list(dict.fromkeys(str(row["kind"]) for row in rows))
    chart: alt.FacetChart = (
        layers.facet(
            facet=alt.Facet("kind:N", sort=panels, title=None),
            data=alt.InlineData(values=rows),
            columns=3,
        )
        .properties(title=alt.TitleParams(title, anchor="start", fontSize=14), background="#fdfdfc")
        .configure_axis(
            domain=False,
            ticks=False,
            gridColor="#e9e9e5",
            labelColor="#5c5f66",
            titleFontWeight="normal",
        )
        .configure_view(stroke=None)
    )
    return chart
