"""What ``plan plan.search=...`` prints: the front, the best, and why its neighbours lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from scalewise import output
from scalewise.plain_console import styled
from scalewise.plan import layouts
from scalewise.plan.lost import neighbours
from scalewise.plan.search import Candidate, Found
from scalewise.plan.verdict import Verdict
from scalewise.units import bytes_text, dollars_text, seconds_text
from scalewise.verbs.show_plan import NO_TIME, STYLES, train_line

SHOWN = 12
"""Rows of a table, at the most."""
PRICED_TOKENS = 1e9


def one(found: Found) -> None:
    """Prints what a search came to."""
    console, asked, best = output.console(), found.asked, found.best
    fitting = sum(candidate.good for candidate in found.candidates)
    console.print(
        f"{asked.name}: {len(found.candidates):,} runs on up to {layouts.devices(asked)} devices, "
        f"{fitting:,} fit"
    )
    if found.candidates:
        run = found.candidates[0].run
        console.print(f"each takes {run.rows_text} a step")
    if found.rank is not asked.plan.rank_by:
        console.print(NO_TIME)
    if best is None:
        _nothing(console, found)
        return
    mixed = any(candidate.training for candidate in found.candidates)
    _front(console, "trained as asked, " * mixed, found.front, best)
    _front(console, "trained otherwise, ", found.otherwise, best)
    of = " of those trained as asked" if mixed else ""
    of = " with the fewest changes to the training" if best.training else of
    style = STYLES[best.fit.verdict]
    console.print()
    least = (f"least {found.rank}{of}: ", (_layout(best), "bold"), ", ")
    console.print(styled(*least, (str(best.fit.verdict), style)))
    console.print(train_line(asked, best.told), soft_wrap=True, style="cyan")
    console.print()
    console.print("one choice away", style="bold")
    shown = Table(box=None, pad_edge=False, show_header=False)
    for lost in neighbours(found):
        shown.add_row(styled((lost.choice, "dim")), lost.what, lost.why)
    console.print(shown)


def _front(console: Console, how: str, front: Sequence[Candidate], best: Candidate) -> None:
    if not front:
        return
    console.print()
    console.print(f"{how}none is better in time, memory and price at once", style="bold")
    console.print(_table(front[:SHOWN], best))
    if len(front) > SHOWN:
        console.print(f"and {len(front) - SHOWN} more", style="dim")


def _nothing(console: Console, found: Found) -> None:
    if not found.candidates:
        console.print("no layout divides the batch, the model and the devices at once")
        return
    nearest = min(found.candidates, key=lambda candidate: candidate.fit.ledger.peak)
    (least, _, _), capacity = nearest.fit.reserved, bytes_text(nearest.fit.capacity or 0)
    if (host := nearest.fit.host) is not None and host.peak > nearest.fit.host_capacity:
        least, capacity = host.peak, f"a node's {bytes_text(nearest.fit.host_capacity)}"
    style = STYLES[Verdict.out_of_memory]
    needs = f"it needs {bytes_text(least)} of {capacity}"
    console.print(styled(("nothing fits", style), f"; {_layout(nearest)} comes nearest: {needs}"))


def _table(candidates: Iterable[Candidate], best: Candidate) -> Table:
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
            layouts.described(run.parallelism),
            run.memory.described(run.model.layers),
            " ".join((*candidate.training, *chunked)),
            str(run.world_size),
            str(layouts.rows_at_once(run)),
            bytes_text(candidate.fit.ledger.peak),
            seconds_text(candidate.seconds) if candidate.step else output.ABSENT,
            f"{candidate.tokens_per_s:,.0f}" if candidate.tokens_per_s else output.ABSENT,
            f"{candidate.mfu:.1%}" if candidate.mfu else output.ABSENT,
            dollars_text(dollars) if dollars else output.ABSENT,
            style="bold" if candidate is best else "",
        )
    return shown


def _layout(candidate: Candidate) -> str:
    run = candidate.run
    return f"{layouts.described(run.parallelism)}, {layouts.rows_at_once(run)} rows at once"
