"""What ``plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from scalewise import output
from scalewise.hardware import DeviceKind
from scalewise.plain_console import styled
from scalewise.plan import traffic
from scalewise.plan.host import checkpoint_bytes, of_node
from scalewise.plan.line import replaced
from scalewise.plan.plan import Plan
from scalewise.plan.spec import Fitting
from scalewise.plan.total import Total
from scalewise.plan.verdict import Verdict
from scalewise.run import Run
from scalewise.trainer import AUTO, SIZE
from scalewise.typed_override import command_line
from scalewise.units import GIGA, bytes_text, count_text, dollars_text, seconds_text

if TYPE_CHECKING:
    from scalewise.training.trace import Trace

STYLES = {
    Verdict.fits: "green",
    Verdict.borderline: "yellow",
    Verdict.out_of_memory: "red",
    Verdict.host_out_of_memory: "red",
    Verdict.unknown: "dim",
}
NO_TIME = (
    "no time: the hardware profile lacks a rate or a bandwidth; "
    "`scalewise calibrate` measures them, then hardware=measured"
)
SMALL_SHARE = 0.001
"""Lines of less than this share of the peak are told together."""


def one(plan: Plan) -> None:
    """Prints the plan of one run."""
    console = output.console()
    run, fit = plan.run, plan.fit
    device = run.hardware.match or run.hardware.device.value.upper()
    count = sum(weight.count for weight in run.adapter.weights(run.model))
    console.print(
        f"{run.name}: {count_text(count)} parameters on "
        f"{run.world_size} {device} rank{'s' * (run.world_size > 1)}, "
        f"{run.tokens_per_step:,} tokens a step"
    )
    if run.hardware.read_off:
        console.print(f"hardware=auto: {run.hardware.read_off}", style="dim", soft_wrap=True)
    console.print()
    console.print(_ledger(plan))
    console.print()
    least, usual, most = fit.reserved
    told = f"{bytes_text(fit.peak)} allocated at the {fit.ledger.fullest}"
    if fit.beside:
        told += f", up to {bytes_text(most)} with all that a process takes"
    elif most > least:
        told += (
            f", {bytes_text(usual)} reserved with the driver's own "
            f"({bytes_text(least)} to {bytes_text(most)})"
        )
    console.print(told)
    if plan.told:
        asked = f"{SIZE}={AUTO}" if plan.told[0].startswith(SIZE) else "memory=auto"
        console.print(f"{asked}: {' '.join(plan.told)}")
    if fit.uncounted and fit.traced is None:
        console.print(f"not counted: {fit.uncounted}; plan.method=trace sees it", style="yellow")
    verdict(plan)
    _time(console, plan)
    _beside(console, plan)


def trace(found: Trace, ledger: int) -> None:
    """Prints what a trace found, beside the ledger's peak with the same operators."""
    depths = " and ".join(str(depth) for depth in found.depths)
    off = ledger / found.peak - 1
    at = max(found.moments, key=lambda name: found.moments[name])
    output.console().print(
        f"traced rank {found.rank} with {depths} layers: {bytes_text(found.peak)} at the peak "
        f"({at}); the ledger says {bytes_text(ledger)}, {off:+.1%} (operators as on the CPU)"
    )


def user(run: Run, found: Mapping[str, int]) -> None:
    """Prints what a trace of a user's module found, bytes by key."""
    console = output.console()
    console.print(
        f"{run.name}: rank 0 of {run.world_size}, traced with a batch of {found['rows']} rows "
        "(operators as on the CPU)"
    )
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("what a step holds")
    shown.add_column("bytes", justify="right")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        shown.add_row(name, bytes_text(found[f"memory/{name}_bytes"]))
    console.print(shown)
    console.print("no time: nobody has counted what a module of yours computes", style="dim")


def stacks(plan: Plan, found: Trace) -> None:
    """Prints what a trace of several stacks found, and what a step computes."""
    console, run = output.console(), plan.run
    console.print(
        f"{run.name}: {count_text(run.model.parameters)} parameters, "
        f"{run.flops_per_step:.4g} flops a step"
    )
    console.print()
    console.print(_ledger(plan))
    console.print()
    console.print(
        f"traced rank {found.rank} with all {found.depths[0]} layers: {bytes_text(found.peak)} "
        f"at the {plan.fit.ledger.fullest} (operators as on the CPU)"
    )
    console.print(f"no formulas and no time: {run.objective.known} is known by trace", style="dim")


def table(rows: Sequence[tuple[Mapping[str, str], Plan]]) -> None:
    """Prints one row a job of a sweep."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    keys = list(dict.fromkeys(key for varied, _ in rows for key in varied))
    for key in keys:
        shown.add_column(key, overflow="fold")
    shown.add_column("verdict")
    for name in ("allocated", "margin", "step", "tok/s", "MFU"):
        shown.add_column(name, justify="right")
    shown.add_column("better with" if any(plan.told for _, plan in rows) else "to make it fit")
    for varied, plan in rows:
        verdict, margin = plan.fit.verdict, plan.fit.margin
        shown.add_row(
            *(varied.get(key, "") for key in keys),
            styled((str(verdict), STYLES[verdict])),
            bytes_text(plan.fit.peak),
            output.ABSENT if margin is None else bytes_text(margin),
            output.ABSENT if plan.step is None else seconds_text(plan.step.seconds),
            output.ABSENT if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}",
            output.ABSENT if plan.mfu is None else f"{plan.mfu:.1%}",
            " ".join(plan.told) or (plan.cure.line if plan.cure else ""),
        )
    output.console().print(shown)


def summed(total: Total, wall: tuple[int, float] | None) -> None:
    """Prints what the jobs of a sweep take together; ``wall``: packed on so many slots, s."""
    told = [f"{total.jobs} job{'s' * (total.jobs != 1)}"]
    if total.unfit:
        told.append(f"{total.unfit} cannot fit (train launch.refuse_unfit=true skips that)")
    timed = total.jobs - total.unfit - total.untimed
    if timed:
        told.append(f"{seconds_text(total.seconds)} one after the other")
    if wall is not None and timed:
        slots, seconds = wall
        told.append(f"{seconds_text(seconds)} on {slots} slot{'s' * (slots != 1)}")
    if total.dollars is not None:
        told.append(dollars_text(total.dollars))
    if total.untimed:
        told.append(f"of {total.untimed} the time is not known")
    console = output.console()
    console.print()
    console.print("; ".join(told), soft_wrap=True)
    if total.unrated:
        console.print(NO_TIME, style="dim", soft_wrap=True)


def train_line(run: Run, told: Sequence[str]) -> str:
    """Returns the command that trains ``run`` with what is ``told``."""
    return command_line("train", replaced(run.overrides, told))


def _ledger(plan: Plan) -> Table:
    ledger = plan.fit.ledger
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("where the bytes go")
    shown.add_column("at the peak", justify="right")
    shown.add_column("at most", justify="right")
    shown.add_column("formula", style="dim")
    shown.add_column("why", style="dim")
    lines = sorted(ledger.lines, key=lambda line: -line.bytes.get(ledger.fullest, 0))
    rest = 0
    for line in lines:
        now = line.bytes.get(ledger.fullest, 0)
        if line.most < SMALL_SHARE * ledger.peak:
            rest += now
            continue
        told = bytes_text(now) if now else output.ABSENT
        shown.add_row(line.what, told, bytes_text(line.most), line.formula, line.reason)
    if rest:
        shown.add_row("the rest", bytes_text(rest), "", "", "lines of less than 0.1 %")
    return shown


def verdict(plan: Plan) -> None:
    """Prints whether a run fits, and what makes it fit."""
    console = output.console()
    fit = plan.fit
    if fit.capacity is None or fit.margin is None:
        console.print(
            "the hardware profile tells of no memory: set hardware.memory_gib", style="dim"
        )
        return
    if fit.verdict is Verdict.host_out_of_memory and fit.host is not None:
        console.print(
            f"a node's main memory lacks {bytes_text(fit.host.peak - fit.host_capacity)} "
            f"of {bytes_text(fit.host.peak)}"
        )
    side = "to spare" if fit.margin >= 0 else "missing"
    of = f"{bytes_text(abs(fit.margin))} {side} of the device's {bytes_text(fit.capacity)}"
    console.print(styled((str(fit.verdict), STYLES[fit.verdict]), f", {of}"))
    if fit.verdict is Verdict.fits:
        return
    cure = plan.cure
    if cure is None and plan.run.objective.of_user:
        return
    if cure is None:
        more = "" if plan.run.objective.by_trace else "; plan.search=all tries more"
        console.print(f"no change that was tried makes it fit{more}")
    else:
        taken = "; train takes it, for plan.fit=auto" * (plan.run.plan.fit is Fitting.auto)
        console.print(f"to make it fit: {cure.line}{taken}", soft_wrap=True)
        console.print(train_line(plan.run, cure.told), style="dim", soft_wrap=True)


def _beside(console: Console, plan: Plan) -> None:
    """Prints what the run takes besides its devices: a node's memory, and the disk."""
    run, host = plan.run, plan.fit.host or of_node(plan.run)
    if run.hardware.device is DeviceKind.cuda:
        largest = sorted(host.lines, key=lambda line: -line.most)
        parts = ", ".join(f"{line.what} {bytes_text(line.most)}" for line in largest)
        of, unjudged = f" of {bytes_text(plan.fit.host_capacity)}", ""
        if plan.fit.host is None:
            of, unjudged = "", "; not judged: set hardware.host_memory_gib"
        told = f"main memory of a node: {bytes_text(host.peak)}{of} ({parts}){unjudged}"
        console.print(told, soft_wrap=True)
    size, keep = checkpoint_bytes(run), run.checkpoint.keep + run.checkpoint.best
    told = f"a checkpoint takes {bytes_text(size)} of the disk"
    if run.checkpoint.every and run.checkpoint.keep:
        told += f", the {keep} that are kept {bytes_text(keep * size)}"
    if run.hardware.disk_gb_per_s:
        told += f", written in {seconds_text(size / run.hardware.disk_gb_per_s / GIGA)}"
    console.print(told)


def _time(console: Console, plan: Plan) -> None:
    step, interval = plan.step, plan.interval
    if step is None or interval is None:
        console.print(NO_TIME, style="dim")
        return
    low, high = map(seconds_text, interval)
    rates = f"{plan.tokens_per_s:,.0f} tok/s, MFU {plan.mfu:.1%}"
    console.print()
    console.print(f"step {seconds_text(step.seconds)} ({low} to {high}), {rates}")
    shares = [
        f"{what} {seconds / step.seconds:.0%}"
        for what, seconds in step.parts().items()
        if seconds >= 0.005 * step.seconds
    ]
    console.print(", ".join(shares), style="dim")
    if unknown := traffic.unknown(plan.run):
        names = " and ".join(f"hardware.{name}" for name in unknown)
        console.print(
            f"what is offloaded takes time that is not counted: set {names}", style="yellow"
        )
    tokens = plan.run.tokens_per_step * plan.run.steps(rows=plan.run.global_batch)
    told = [f"{count_text(tokens)} tokens in {seconds_text(plan.seconds_for(tokens) or 0.0)}"]
    dollars, kwh = plan.dollars_for(1e9), plan.kwh_for(1e9)
    if dollars is not None:
        told.append(f"a billion for {dollars_text(dollars)}")
    if kwh is not None:
        told.append(f"{kwh:,.0f} kWh")
    console.print(", ".join(told))
