"""The README's figures, written from the records that they quote."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

from scalewise.units import MEGA

BEGIN, END = "<!-- measured -->\n", "\n<!-- /measured -->"
WIDTH = 100


def renew(readme: Path, records: Path) -> None:
    """Puts the figures of the CPU's records between their marks in the README."""
    head, rest = readme.read_text("utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    readme.write_text(head + BEGIN + paragraph(records) + END + tail, "utf-8")


def paragraph(records: Path) -> str:
    """Returns what the README says of two ranks on a CPU."""
    parallel, slow = (_read(records / "cpu" / f"{name}.json") for name in ("parallel", "slow_link"))
    machine, layouts = parallel["machine"], slow["layouts"]
    steps = " and ".join(
        "{median:.2f} with {name} ({low:.2f} to {high:.2f})".format(name=name, **layout["ratio"])
        for name, layout in parallel["layouts"].items()
    )
    start = parallel["launch_s"]["median"]
    links = "; ".join(_link(name, layout) for name, layout in layouts.items())
    return fill(
        f"On {machine['cores']} cores ({machine['processor']}, {parallel['date'][:10]}, torch "
        f"{parallel['versions']['torch']}) a step takes this many times a hand-written one: "
        f"{steps}. Two warm ranks start in {start:.2f} s. From loopback to a link of "
        f"{slow['mbit']:g} Mbit/s a step goes: {links}. Over gloo a reduce-scatter sends what an "
        "all-reduce does, so fsdp sends more than declared.",
        WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _link(name: str, layout: dict[str, Any]) -> str:
    times = f"{name} from {1000 * layout['open_s']:.0f} to {1000 * layout['slow_s']:.0f} ms"
    if layout["predicted_s"] is None:
        return f"{times}, sending {layout['sent_bytes'] / MEGA:.1f} MB"
    return (
        f"{times} (predicted {1000 * layout['predicted_s']:.0f}), sending "
        f"{layout['sent_bytes'] / MEGA:.1f} MB (declared {layout['declared_bytes'] / MEGA:.1f})"
    )


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content
