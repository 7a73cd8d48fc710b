"""The README's figures, written from the records that they quote."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

from scalewise.units import MEGA

WIDTH = 100


def update_readme(readme: Path, records: Path) -> None:
    """Puts the figures of the CPU's records between their marks in the README."""
    text = readme.read_text("utf-8")
    for name, paragraph in PARAGRAPHS.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        head, rest = text.split(begin)
        text = head + begin + paragraph(records) + end + rest.split(end)[1]
    readme.write_text(text, "utf-8")


def memory_figures(records: Path) -> str:
    """Returns what the README says of the ledger beside runs here and traces of large ones."""
    record = _read_record(records / "cpu" / "ledger.json")
    trained, zero, traced = (record[kind]["errors"] for kind in ("trained", "deepspeed", "traced"))
    return _fill_marks(
        f"Of {trained['rows']} small runs over every native layout (`scalewise bench ledger`, "
        f"{record['date'][:10]}) the ledger's peak is {trained['median']:.2%} off what was alive "
        f"at the median and {trained['worst']:.2%} at the worst; of {traced['rows']} large ones, "
        f"up to 8B on 128 devices and 70B on 32, {traced['median']:.2%} and "
        f"{traced['worst']:.2%} off their traces. Of {zero['rows']} small runs under DeepSpeed it "
        f"is {zero['median']:.1%} and {zero['worst']:.1%} off."
    )


def planner_figures(records: Path) -> str:
    """Returns what the README says of the planner beside published measurements."""
    record = _read_record(records / "cpu" / "planner.json")
    memory, verdicts = record["memory"]["all"], record["verdicts"]
    plain, others, own = (
        _error_text(record[f"tokens_per_s{name}"]["all"]) for name in ("", "_others", "_scaled")
    )
    return _fill_marks(
        f"Beside {record['rows']} published measurements of four other frameworks "
        f"(`scalewise bench planner`, {record['date'][:10]}), memory is {memory['median']:.1%} off "
        f"at the median and {memory['p90']:.0%} at the 90th percentile of {memory['rows']} rows. "
        f"For the rows that ran its verdict is {_command_text(verdicts['ran'])}; for those that "
        f"ran out of memory {_command_text(verdicts['ran_out_of_memory'])}. Tokens/s of the "
        f"formulas alone are {plain}; times one scale, learnt from the rows of the other sources "
        f"only, {others}; with "
        f"one scale for each framework, device and format {own}. The profiles of GPUs carry the "
        f"median scale of all these rows, {record['step_scale']['median']:.2f}. No constant is "
        "fitted to a row, but these rows were looked at while the facts of their frameworks were "
        "written down: others may be further off."
    )


def _error_text(errors: dict[str, Any]) -> str:
    return f"{errors['median']:.1%} and {errors['p90']:.0%} off ({errors['rows']} rows)"


def _command_text(verdicts: dict[str, int]) -> str:
    told = (f"{name.replace('_', ' ')} {count} times" for name, count in verdicts.items())
    return ", ".join(told)


def overhead_figures(records: Path) -> str:
    """Returns what the README says of two ranks on a CPU."""
    parallel, slow = (
        _read_record(records / "cpu" / f"{name}.json") for name in ("parallel", "slow_link")
    )
    machine, layouts = parallel["machine"], slow["layouts"]
    steps = " and ".join(
        "{median:.2f} with {name} ({low:.2f} to {high:.2f})".format(name=name, **layout["ratio"])
        for name, layout in parallel["layouts"].items()
    )
    start = parallel["launch_s"]["median"]
    links = "; ".join(_record_link(name, layout) for name, layout in layouts.items())
    return _fill_marks(
        f"On {machine['cores']} cores ({machine['processor']}, {parallel['date'][:10]}, torch "
        f"{parallel['versions']['torch']}) a step takes this many times a hand-written one: "
        f"{steps}. Two warm ranks start in {start:.2f} s. From loopback to a link of "
        f"{slow['mbit']:g} Mbit/s a step goes: {links}. Over gloo a reduce-scatter sends what an "
        "all-reduce does, so fsdp sends more than declared."
    )


def startup_figures(records: Path) -> str:
    """Returns what the README says of a sweep's jobs beside fresh processes."""
    record = _read_record(records / "cpu" / "sweep.json")
    ratio, fresh, warm = record["ratio"], record["fresh_s"]["median"], record["warm_s"]["median"]
    return _fill_marks(
        f"On {record['machine']['cores']} cores ({record['date'][:10]}) a job of {record['steps']} "
        f"steps in a warm sweep, in a process of its own, takes {warm:.2f} s where a fresh "
        f"`python -m scalewise` takes {fresh:.1f}: {ratio['median']:.3f} of it ({ratio['low']:.3f} "
        f"to {ratio['high']:.3f} over {ratio['pairs']} pairs)."
    )


PARAGRAPHS = {
    "started": startup_figures,
    "measured": overhead_figures,
    "foreseen": memory_figures,
    "planned": planner_figures,
}


def _fill_marks(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _record_link(name: str, layout: dict[str, Any]) -> str:
    times = f"{name} from {1000 * layout['open_s']:.0f} to {1000 * layout['slow_s']:.0f} ms"
    if layout["predicted_s"] is None:
        return f"{times}, sending {layout['sent_bytes'] / MEGA:.1f} MB"
    return (
        f"{times} (predicted {1000 * layout['predicted_s']:.0f}), sending "
        f"{layout['sent_bytes'] / MEGA:.1f} MB (declared {layout['declared_bytes'] / MEGA:.1f})"
    )


def _read_record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content
