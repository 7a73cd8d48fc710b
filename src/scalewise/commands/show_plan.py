"""What ``plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from scalewise.console import MISSING, get_console
from scalewise.hardware import DeviceKind
from scalewise.plain_console import styled_text
from scalewise.planner import host_transfer
from scalewise.planner.config import UnfitPolicy
from scalewise.planner.fit_check import FitStatus
from scalewise.planner.host_memory import checkpoint_bytes, node_memory
from scalewise.planner.override_edit import replace_overrides
from scalewise.planner.plan import Plan
from scalewise.planner.sweep_totals import SweepTotals
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, SIZE
from scalewise.typed_override import command_line
from scalewise.units import GIGA, format_bytes, format_count, format_dollars, format_seconds

if TYPE_CHECKING:
    from scalewise.training.fake_tensor_trace import StepTrace

STYLES = {
    FitStatus.fits: "green",
    FitStatus.borderline: "yellow",
    FitStatus.out_of_memory: "red",
    FitStatus.host_out_of_memory: "red",
    FitStatus.unknown: "dim",
}
NO_TIME = (
    "no time: the hardware profile lacks a rate or a bandwidth; "
    "`scalewise calibrate` measures them, then hardware=measured"
)
SMALL_SHARE = 0.001
"""Lines of less than this share of the peak are told together."""


def print_plan(plan: Plan) -> None:
    """Prints the plan of one run."""
    console = get_console()
    run, fit = plan.run, plan.fit
    device = run.hardware.match or run.hardware.device.value.upper()
    count = sum(weight.numel for weight in run.adapter.weights(run.model))
    console.print(
        f"{run.name}: {format_count(count)} parameters on "
        f"{run.world_size} {device} rank{'s' * (run.world_size > 1)}, "
        f"{run.tokens_per_step:,} tokens a step"
    )
    if run.hardware.read_off:
        console.print(f"hardware=auto: {run.hardware.read_off}", style="dim", soft_wrap=True)
    console.print()
    console.print(_breakdown_table(plan))
    console.print()
    least, usual, most = fit.reserved
    told = f"{format_bytes(fit.peak)} allocated at the {fit.breakdown.peak_phase}"
    if fit.process_overhead:
        told += f", up to {format_bytes(most)} with all that a process takes"
    elif most > least:
        told += (
            f", {format_bytes(usual)} reserved with the driver's own "
            f"({format_bytes(least)} to {format_bytes(most)})"
        )
    console.print(told)
    if plan.overrides:
        asked = f"{SIZE}={AUTO}" if plan.overrides[0].startswith(SIZE) else "memory=auto"
        console.print(f"{asked}: {' '.join(plan.overrides)}")
    if fit.unmodeled_memory and fit.traced_peak is None:
        console.print(
            f"not counted: {fit.unmodeled_memory}; plan.method=trace sees it", style="yellow"
        )
    print_fit(plan)
    _print_time(console, plan)
    _print_host_and_disk(console, plan)


def print_trace(trace: StepTrace, predicted_peak: int) -> None:
    """Prints what a trace found, beside the ledger's peak with the same operators."""
    depths = " and ".join(str(depth) for depth in trace.traced_depths)
    off = predicted_peak / trace.peak - 1
    at = max(trace.phase_peaks, key=lambda name: trace.phase_peaks[name])
    get_console().print(
        f"traced rank {trace.rank} with {depths} layers: {format_bytes(trace.peak)} at the peak "
        f"({at}); the ledger says {format_bytes(predicted_peak)}, {off:+.1%} "
        "(operators as on the CPU)"
    )


def print_user_trace(run: RunConfig, trace: Mapping[str, int]) -> None:
    """Prints what a trace of a user's module found, bytes by key."""
    console = get_console()
    console.print(
        f"{run.name}: rank 0 of {run.world_size}, traced with a batch of {trace['rows']} rows "
        "(operators as on the CPU)"
    )
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("what a step holds")
    shown.add_column("bytes", justify="right")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        shown.add_row(name, format_bytes(trace[f"memory/{name}_bytes"]))
    console.print(shown)
    console.print("no time: nobody has counted what a module of yours computes", style="dim")


def print_stacks_trace(plan: Plan, trace: StepTrace) -> None:
    """Prints what a trace of several stacks found, and what a step computes."""
    console, run = get_console(), plan.run
    console.print(
        f"{run.name}: {format_count(run.model.num_parameters)} parameters, "
        f"{run.flops_per_step:.4g} flops a step"
    )
    console.print()
    console.print(_breakdown_table(plan))
    console.print()
    console.print(
        f"traced rank {trace.rank} with all {trace.traced_depths[0]} layers: "
        f"{format_bytes(trace.peak)} at the {plan.fit.breakdown.peak_phase} "
        "(operators as on the CPU)"
    )
    console.print(
        f"no formulas and no time: the analytic models do not cover {run.objective.model_kind}",
        style="dim",
    )


def print_plan_table(rows: Sequence[tuple[Mapping[str, str], Plan]]) -> None:
    """Prints one row a job of a sweep."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    keys = list(dict.fromkeys(key for varied, _ in rows for key in varied))
    for key in keys:
        shown.add_column(key, overflow="fold")
    shown.add_column("verdict")
    for name in ("allocated", "margin", "step", "tok/s", "MFU"):
        shown.add_column(name, justify="right")
    shown.add_column("better with" if any(plan.overrides for _, plan in rows) else "to make it fit")
    for varied, plan in rows:
        verdict, margin = plan.fit.status, plan.fit.margin
        shown.add_row(
            *(varied.get(key, "") for key in keys),
            styled_text((str(verdict), STYLES[verdict])),
            format_bytes(plan.fit.peak),
            MISSING if margin is None else format_bytes(margin),
            MISSING if plan.step_time is None else format_seconds(plan.step_time.seconds),
            MISSING if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}",
            MISSING if plan.mfu is None else f"{plan.mfu:.1%}",
            " ".join(plan.overrides)
            or (plan.suggested_fix.override_text if plan.suggested_fix else ""),
        )
    get_console().print(shown)


def print_totals(totals: SweepTotals, packed_makespan: tuple[int, float] | None) -> None:
    """Prints what the jobs of a sweep take together; ``packed_makespan``: packed on so many slots,
    s."""
    told = [f"{totals.jobs} job{'s' * (totals.jobs != 1)}"]
    if totals.unfit:
        told.append(f"{totals.unfit} cannot fit (train launch.refuse_unfit=true skips that)")
    timed = totals.jobs - totals.unfit - totals.untimed
    if timed:
        told.append(f"{format_seconds(totals.seconds)} one after the other")
    if packed_makespan is not None and timed:
        slots, seconds = packed_makespan
        told.append(f"{format_seconds(seconds)} on {slots} slot{'s' * (slots != 1)}")
    if totals.dollars is not None:
        told.append(format_dollars(totals.dollars))
    if totals.untimed:
        told.append(f"of {totals.untimed} the time is not known")
    console = get_console()
    console.print()
    console.print("; ".join(told), soft_wrap=True)
    if totals.unrated:
        console.print(NO_TIME, style="dim", soft_wrap=True)


def train_command(run: RunConfig, overrides: Sequence[str]) -> str:
    """Returns the command that trains ``run`` with what is ``overrides``."""
    return command_line("train", replace_overrides(run.overrides, overrides))


def _breakdown_table(plan: Plan) -> Table:
    breakdown = plan.fit.breakdown
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("where the bytes go")
    shown.add_column("at the peak", justify="right")
    shown.add_column("at most", justify="right")
    shown.add_column("formula", style="dim")
    shown.add_column("why", style="dim")
    lines = sorted(breakdown.entries, key=lambda line: -line.bytes.get(breakdown.peak_phase, 0))
    rest = 0
    for line in lines:
        now = line.bytes.get(breakdown.peak_phase, 0)
        if line.max_bytes < SMALL_SHARE * breakdown.peak:
            rest += now
            continue
        told = format_bytes(now) if now else MISSING
        shown.add_row(line.name, told, format_bytes(line.max_bytes), line.formula, line.reason)
    if rest:
        shown.add_row("the rest", format_bytes(rest), "", "", "lines of less than 0.1 %")
    return shown


def print_fit(plan: Plan) -> None:
    """Prints whether a run fits, and what makes it fit."""
    console = get_console()
    fit = plan.fit
    if fit.capacity is None or fit.margin is None:
        console.print(
            "the hardware profile tells of no memory: set hardware.memory_gib", style="dim"
        )
        return
    if fit.status is FitStatus.host_out_of_memory and fit.host_breakdown is not None:
        console.print(
            f"a node's main memory lacks "
            f"{format_bytes(fit.host_breakdown.peak - fit.host_capacity)} "
            f"of {format_bytes(fit.host_breakdown.peak)}"
        )
    side = "to spare" if fit.margin >= 0 else "missing"
    of = f"{format_bytes(abs(fit.margin))} {side} of the device's {format_bytes(fit.capacity)}"
    console.print(styled_text((str(fit.status), STYLES[fit.status]), f", {of}"))
    if fit.status is FitStatus.fits:
        return
    fix = plan.suggested_fix
    if fix is None and plan.run.objective.is_user_defined:
        return
    if fix is None:
        more = "" if plan.run.objective.trace_only else "; plan.search=all tries more"
        console.print(f"no change that was tried makes it fit{more}")
    else:
        taken = "; train takes it, for plan.fit=auto" * (plan.run.plan.fit is UnfitPolicy.auto)
        console.print(f"to make it fit: {fix.override_text}{taken}", soft_wrap=True)
        console.print(train_command(plan.run, fix.overrides), style="dim", soft_wrap=True)


def _print_host_and_disk(console: Console, plan: Plan) -> None:
    """Prints what the run takes besides its devices: a node's memory, and the disk."""
    run, host = plan.run, plan.fit.host_breakdown or node_memory(plan.run)
    if run.hardware.device is DeviceKind.cuda:
        largest = sorted(host.entries, key=lambda line: -line.max_bytes)
        parts = ", ".join(f"{line.name} {format_bytes(line.max_bytes)}" for line in largest)
        of, unjudged = f" of {format_bytes(plan.fit.host_capacity)}", ""
        if plan.fit.host_breakdown is None:
            of, unjudged = "", "; not judged: set hardware.host_memory_gib"
        told = f"main memory of a node: {format_bytes(host.peak)}{of} ({parts}){unjudged}"
        console.print(told, soft_wrap=True)
    size, keep = checkpoint_bytes(run), run.checkpoint.keep + run.checkpoint.best
    told = f"a checkpoint takes {format_bytes(size)} of the disk"
    if run.checkpoint.every and run.checkpoint.keep:
        told += f", the {keep} that are kept {format_bytes(keep * size)}"
    if run.hardware.disk_gb_per_s:
        told += f", written in {format_seconds(size / run.hardware.disk_gb_per_s / GIGA)}"
    console.print(told)


def _print_time(console: Console, plan: Plan) -> None:
    step, interval = plan.step_time, plan.step_seconds_range
    if step is None or interval is None:
        console.print(NO_TIME, style="dim")
        return
    low, high = map(format_seconds, interval)
    rates = f"{plan.tokens_per_s:,.0f} tok/s, MFU {plan.mfu:.1%}"
    console.print()
    console.print(f"step {format_seconds(step.seconds)} ({low} to {high}), {rates}")
    shares = [
        f"{what} {seconds / step.seconds:.0%}"
        for what, seconds in step.parts().items()
        if seconds >= 0.005 * step.seconds
    ]
    console.print(", ".join(shares), style="dim")
    if unknown := host_transfer.missing_rates(plan.run):
        names = " and ".join(f"hardware.{name}" for name in unknown)
        console.print(
            f"what is offloaded takes time that is not counted: set {names}", style="yellow"
        )
    tokens = plan.run.tokens_per_step * plan.run.num_steps(samples=plan.run.global_batch)
    told = [f"{format_count(tokens)} tokens in {format_seconds(plan.seconds_for(tokens) or 0.0)}"]
    dollars, kwh = plan.dollars_for(1e9), plan.kwh_for(1e9)
    if dollars is not None:
        told.append(f"a billion for {format_dollars(dollars)}")
    if kwh is not None:
        told.append(f"{kwh:,.0f} kWh")
    console.print(", ".join(told))
