"""What ``plan plan.search=...`` prints: the front, the best, and why its neighbours lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from scalewise.commands.show_plan import NO_TIME, STYLES, train_command
from scalewise.console import MISSING, get_console
from scalewise.plain_console import styled_text
from scalewise.planner import layout_enumeration
from scalewise.planner.alternatives import neighbor_alternatives
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.search import SearchCandidate, SearchResult
from scalewise.units import format_bytes, format_dollars, format_seconds

SHOWN = 12
"""Rows of a table, at the most."""
PRICED_TOKENS = 1e9


def print_search(result: SearchResult) -> None:
    """Prints what a search came to."""
    console, asked, best = get_console(), result.base_run, result.best
    fitting = sum(candidate.is_acceptable for candidate in result.candidates)
    console.print(
        f"{asked.name}: {len(result.candidates):,} runs on up to "
        f"{layout_enumeration.available_devices(asked)} devices, {fitting:,} fit"
    )
    if result.candidates:
        run = result.candidates[0].run
        console.print(f"each takes {run.batch_description} a step")
    if result.rank_by is not asked.plan.rank_by:
        console.print(NO_TIME)
    if best is None:
        _print_no_result(console, result)
        return
    mixed = any(candidate.training_overrides for candidate in result.candidates)
    _print_front(console, "trained as asked, " * mixed, result.pareto_front, best)
    _print_front(console, "trained otherwise, ", result.changed_training_front, best)
    of = " of those trained as asked" if mixed else ""
    of = " with the fewest changes to the training" if best.training_overrides else of
    style = STYLES[best.fit.status]
    console.print()
    least = (f"least {result.rank_by}{of}: ", (_layout_text(best), "bold"), ", ")
    console.print(styled_text(*least, (str(best.fit.status), style)))
    console.print(train_command(asked, best.overrides), soft_wrap=True, style="cyan")
    console.print()
    console.print("one choice away", style="bold")
    shown = Table(box=None, pad_edge=False, show_header=False)
    for lost in neighbor_alternatives(result):
        shown.add_row(styled_text((lost.choice, "dim")), lost.value, lost.reason)
    console.print(shown)


def _print_front(
    console: Console, description: str, front: Sequence[SearchCandidate], best: SearchCandidate
) -> None:
    if not front:
        return
    console.print()
    console.print(f"{description}none is better in time, memory and price at once", style="bold")
    console.print(_candidate_table(front[:SHOWN], best))
    if len(front) > SHOWN:
        console.print(f"and {len(front) - SHOWN} more", style="dim")


def _print_no_result(console: Console, result: SearchResult) -> None:
    if not result.candidates:
        console.print("no layout divides the batch, the model and the devices at once")
        return
    nearest = min(result.candidates, key=lambda candidate: candidate.fit.breakdown.peak)
    (least, _, _), capacity = nearest.fit.reserved, format_bytes(nearest.fit.capacity or 0)
    if (host := nearest.fit.host_breakdown) is not None and host.peak > nearest.fit.host_capacity:
        least, capacity = host.peak, f"a node's {format_bytes(nearest.fit.host_capacity)}"
    style = STYLES[FitStatus.out_of_memory]
    needs = f"it needs {format_bytes(least)} of {capacity}"
    console.print(
        styled_text(("nothing fits", style), f"; {_layout_text(nearest)} comes nearest: {needs}")
    )


def _candidate_table(candidates: Iterable[SearchCandidate], best: SearchCandidate) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layout", "recompute", "otherwise"):
        shown.add_column(name)
    for name in ("devices", "rows at once", "allocated", "step", "tok/s", "MFU", "a billion"):
        shown.add_column(name, justify="right")
    for candidate in candidates:
        run, dollars = candidate.run, candidate.dollars_for(PRICED_TOKENS)
        chunk = run.objective.loss_chunk
        chunked = () if chunk is None else (f"loss_chunk={chunk}",)
        shown.add_row(
            layout_enumeration.layout_text(run.parallelism),
            run.memory.describe(run.model.layers),
            " ".join((*candidate.training_overrides, *chunked)),
            str(run.world_size),
            str(layout_enumeration.sequences_per_forward(run)),
            format_bytes(candidate.fit.breakdown.peak),
            format_seconds(candidate.step_seconds) if candidate.step_time else MISSING,
            f"{candidate.tokens_per_s:,.0f}" if candidate.tokens_per_s else MISSING,
            f"{candidate.mfu:.1%}" if candidate.mfu else MISSING,
            format_dollars(dollars) if dollars else MISSING,
            style="bold" if candidate is best else "",
        )
    return shown


def _layout_text(candidate: SearchCandidate) -> str:
    run = candidate.run
    rows = layout_enumeration.sequences_per_forward(run)
    return f"{layout_enumeration.layout_text(run.parallelism)}, {rows} rows at once"
