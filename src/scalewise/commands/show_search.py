"""Output of ``scalewise plan plan.search=...``: Pareto front, best run and its alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from scalewise.commands.show_plan import NO_TIME, STYLES, train_command
from scalewise.console import MISSING
from scalewise.plain_console import get_console, styled_text
from scalewise.planner import layout_enumeration
from scalewise.planner.alternatives import neighbor_alternatives
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.search_result import SearchCandidate, SearchResult
from scalewise.units import format_bytes, format_dollars, format_seconds

MAX_ROWS = 12
"""Maximum number of rows of a table."""
PRICED_TOKENS = 1e9


def print_search(result: SearchResult) -> None:
    """Print the result of a search."""
    console, base_run, best = get_console(), result.base_run, result.best
    num_fitting = sum(candidate.is_acceptable for candidate in result.candidates)
    console.print(
        f"{base_run.name}: {len(result.candidates):,} runs on up to "
        f"{layout_enumeration.available_devices(base_run)} devices, {num_fitting:,} fit"
    )
    if result.candidates:
        run = result.candidates[0].run
        console.print(f"Batch per step: {run.batch_description}")
        if run.precision != base_run.precision:
            console.print(
                "precision=bf16_mixed, which the device supports; set precision=fp32 for fp32"
            )
    if result.rank_by is not base_run.plan.rank_by:
        console.print(NO_TIME)
    if best is None:
        _print_no_result(console, result)
        return
    changes_training = any(candidate.training_overrides for candidate in result.candidates)
    unchanged = "Unchanged training: " * changes_training
    _print_front(console, unchanged, result.pareto_front, best)
    _print_front(console, "Changed training: ", result.changed_training_front, best)
    scope = " with unchanged training" * changes_training
    if best.training_overrides:
        scope = " with the fewest changes of training"
    style = STYLES[best.fit.status]
    console.print()
    summary = (f"Best {result.rank_by}{scope}: ", (_layout_text(best), "bold"), ", ")
    console.print(styled_text(*summary, (str(best.fit.status), style)))
    console.print(train_command(base_run, best.overrides), soft_wrap=True, style="cyan")
    if (lowest := result.lowest_cost) is not None and lowest is not best:
        saved = 1 - lowest.cost(result.rank_by)[0] / best.cost(result.rank_by)[0]
        drawback = "needs DeepSpeed" if lowest.needs_deepspeed else "has more mesh axes"
        console.print(
            f"{_layout_text(lowest)} {drawback}; its predicted {result.rank_by} is "
            f"{saved:.1%} less, which is within the error",
            soft_wrap=True,
        )
    console.print()
    console.print("Alternatives that differ in one choice", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    for alternative in neighbor_alternatives(result):
        choice = styled_text((alternative.choice, "dim"))
        table.add_row(choice, alternative.value, alternative.reason)
    console.print(table)


def _print_front(
    console: Console, description: str, front: Sequence[SearchCandidate], best: SearchCandidate
) -> None:
    if not front:
        return
    console.print()
    console.print(f"{description}Pareto front of time, memory and price", style="bold")
    console.print(_candidate_table(front[:MAX_ROWS], best))
    if len(front) > MAX_ROWS:
        console.print(f"and {len(front) - MAX_ROWS} more", style="dim")


def _print_no_result(console: Console, result: SearchResult) -> None:
    if not result.candidates:
        console.print("No valid layout: none divides the batch, the model and the devices")
        return
    nearest = min(result.candidates, key=lambda candidate: candidate.fit.breakdown.peak)
    (lowest, _, _), capacity = nearest.fit.reserved, format_bytes(nearest.fit.capacity or 0)
    if (host := nearest.fit.host_breakdown) is not None and host.peak > nearest.fit.host_capacity:
        lowest, capacity = host.peak, f"a node's {format_bytes(nearest.fit.host_capacity)}"
    style = STYLES[FitStatus.out_of_memory]
    needs = f"it needs {format_bytes(lowest)} of {capacity}"
    console.print(
        styled_text(("Nothing fits", style), f"; closest is {_layout_text(nearest)}: {needs}")
    )


def _candidate_table(candidates: Iterable[SearchCandidate], best: SearchCandidate) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layout", "recompute", "other overrides"):
        table.add_column(name)
    for name in (
        "devices",
        "sequences",
        "peak memory",
        "step time",
        "tok/s",
        "MFU",
        "MFU (PaLM)",
        "per 1B tokens",
    ):
        table.add_column(name, justify="right")
    for candidate in candidates:
        run, dollars = candidate.run, candidate.dollars_for(PRICED_TOKENS)
        chunk = run.objective.loss_chunk
        chunk_overrides = () if chunk is None else (f"loss_chunk={chunk}",)
        table.add_row(
            layout_enumeration.layout_text(run.parallelism),
            run.memory.describe(run.model.layers),
            " ".join((*candidate.training_overrides, *candidate.refinement, *chunk_overrides)),
            str(run.world_size),
            str(layout_enumeration.sequences_per_forward(run)),
            format_bytes(candidate.fit.breakdown.peak),
            format_seconds(candidate.step_seconds) if candidate.step_time else MISSING,
            f"{candidate.tokens_per_s:,.0f}" if candidate.tokens_per_s else MISSING,
            f"{candidate.mfu:.1%}" if candidate.mfu else MISSING,
            f"{candidate.mfu_palm:.1%}" if candidate.mfu_palm else MISSING,
            format_dollars(dollars) if dollars else MISSING,
            style="bold" if candidate is best else "",
        )
    return table


def _layout_text(candidate: SearchCandidate) -> str:
    run = candidate.run
    sequences = layout_enumeration.sequences_per_forward(run)
    layout = layout_enumeration.layout_text(run.parallelism)
    return f"{layout}, {sequences} sequence{'s' * (sequences != 1)} per forward pass"
