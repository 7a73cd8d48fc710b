"""Output of ``scalewise plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from scalewise.config.command import RejectedJob
from scalewise.console import MISSING, print_lines
from scalewise.hardware import BUILT_IN, DeviceKind
from scalewise.plain_console import get_console, styled_text
from scalewise.plan_config import UnfitPolicy
from scalewise.planner import host_memory
from scalewise.planner.bottleneck import bottleneck_hint
from scalewise.planner.fit_check import UNBALANCED_LOAD, FitStatus
from scalewise.planner.host_memory import checkpoint_bytes, node_memory
from scalewise.planner.plan import Plan, SweepTotals, training_seconds
from scalewise.planner.step_parts import step_part_title
from scalewise.planner.step_time import predict_collective_seconds
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope
from scalewise.trainer_config import AUTO, MICRO_BATCH_KEY
from scalewise.typed_override import command_line, replace_overrides
from scalewise.units import (
    GIGA,
    format_bytes,
    format_count,
    format_dollars,
    format_mfu,
    format_seconds,
)

if TYPE_CHECKING:
    from scalewise.tracing.step_trace import StepTrace

STYLES = {
    FitStatus.fits: "green",
    FitStatus.borderline: "yellow",
    FitStatus.out_of_memory: "red",
    FitStatus.host_out_of_memory: "red",
    FitStatus.unknown: "dim",
}
STATUS_TITLES = {
    FitStatus.fits: "Fits",
    FitStatus.borderline: "Borderline",
    FitStatus.out_of_memory: "Out of memory",
    FitStatus.host_out_of_memory: "Out of host memory",
    FitStatus.unknown: "Unknown",
}
CALIBRATE = "run `scalewise calibrate`, then add -cd conf hardware=measured"
NO_TIME = f"Step time not predicted: the hardware profile lacks a rate or a bandwidth; {CALIBRATE}"
SMALL_SHARE = 0.001
"""Entries below this share of the peak are summed in one line."""


def print_plan(plan: Plan) -> None:
    """Print the plan of one run."""
    console = get_console()
    run, fit = plan.run, plan.fit
    device = run.hardware.match or run.hardware.device.value.upper()
    count = sum(weight.numel for weight in run.adapter.weights(run.model))
    active = run.adapter.active_parameters(run.model)
    active_text = f" ({format_count(active)} active)" if active < count else ""
    console.print(
        f"{run.name}: {format_count(count)} parameters{active_text} on "
        f"{run.world_size} {device} rank{'s' * (run.world_size > 1)}, "
        f"{run.tokens_per_step:,} tokens per step"
    )
    if run.hardware.read_off and run.hardware.device is DeviceKind.cuda:
        console.print(f"hardware=auto: {run.hardware.read_off}", style="dim", soft_wrap=True)
    print_fit(plan)
    console.print()
    console.print(_breakdown_table(plan))
    console.print()
    lowest, typical, highest = fit.reserved
    phase = fit.breakdown.peak_phase.description
    peak = f"Peak allocated memory: {format_bytes(fit.peak)}, in the {phase}"
    if fit.process_overhead:
        peak += f"; up to {format_bytes(highest)} with process overhead"
    elif highest > lowest:
        peak += (
            f"; {format_bytes(typical)} reserved "
            f"({format_bytes(lowest)} to {format_bytes(highest)})"
        )
    console.print(peak, soft_wrap=True)
    if run.compile.scope is CompileScope.auto and run.hardware.device is DeviceKind.cuda:
        console.print(f"compile=auto: {run.applied_compile.scope}")
    if plan.overrides:
        key = (
            f"{MICRO_BATCH_KEY}={AUTO}"
            if plan.overrides[0].startswith(MICRO_BATCH_KEY)
            else "memory=auto"
        )
        console.print(f"{key}: {' '.join(plan.overrides)}")
    if fit.unbalanced_peak:
        console.print(
            f"With balanced experts; {format_bytes(fit.unbalanced_peak)} if those of a rank "
            f"receive {UNBALANCED_LOAD:g} times the mean load"
        )
    _print_time(console, plan)
    _print_host_and_disk(console, plan)


def print_trace(trace: StepTrace, predicted_peak: int) -> None:
    """Print the peak of a trace, and the predicted peak with the same operators."""
    depths = " and ".join(str(depth) for depth in trace.traced_depths)
    error = predicted_peak / trace.peak - 1
    peak_phase = max(trace.phase_peaks, key=lambda name: trace.phase_peaks[name])
    get_console().print(
        f"Traced rank {trace.rank} with {depths} layers: peak {format_bytes(trace.peak)} "
        f"({peak_phase}); predicted {format_bytes(predicted_peak)}, {error:+.1%} "
        f"({trace.device.upper()} operators)"
    )


def print_user_trace(run: RunConfig, trace: Mapping[str, int]) -> None:
    """Print the trace of a user-defined module; ``trace`` maps metric keys to bytes."""
    console = get_console()
    console.print(
        f"{run.name}: rank 0 of {run.world_size}, traced with a micro-batch of {trace['rows']} "
        "(CPU operators)"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("memory of a step")
    table.add_column("bytes", justify="right")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        table.add_row(name, format_bytes(trace[f"memory/{name}_bytes"]))
    console.print(table)
    console.print(
        "Step time not predicted: the FLOPs of a user-defined module are unknown", style="dim"
    )


def print_plan_table(rows: Sequence[tuple[Mapping[str, str], Plan]]) -> None:
    """Print a table with one row per job of a sweep."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    keys = list(dict.fromkeys(key for assignments, _ in rows for key in assignments))
    for key in keys:
        table.add_column(key, overflow="fold")
    table.add_column("fit")
    for name in ("peak memory", "free", "step time", "tok/s", "MFU", "MFU (PaLM)"):
        table.add_column(name, justify="right")
    table.add_column("overrides" if any(plan.overrides for _, plan in rows) else "suggested fix")
    for assignments, plan in rows:
        status, margin = plan.fit.status, plan.fit.margin
        table.add_row(
            *(assignments.get(key, "") for key in keys),
            styled_text((str(status), STYLES[status])),
            format_bytes(plan.fit.peak),
            MISSING if margin is None else format_bytes(margin),
            MISSING if plan.step_time is None else format_seconds(plan.step_time.seconds),
            MISSING if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}",
            MISSING if plan.mfu is None else f"{plan.mfu:.1%}",
            MISSING if plan.mfu_palm is None else f"{plan.mfu_palm:.1%}",
            " ".join(plan.overrides)
            or (plan.suggested_fix.override_text if plan.suggested_fix else ""),
        )
    get_console().print(table)


def print_rejected(jobs: Sequence[RejectedJob]) -> None:
    """Print the rejected jobs of a sweep, each with its issues."""
    for job in jobs:
        varied = " ".join(f"{key}={value}" for key, value in job.varied.items())
        print_lines(f"rejected: {varied}", *(f"  - {issue}" for issue in job.error.issues))


def print_totals(totals: SweepTotals, packed_makespan: tuple[int, float] | None) -> None:
    """Print the totals of a sweep.

    ``packed_makespan``: number of slots, and seconds until the last job ends.
    """
    parts = [f"{totals.jobs} job{'s' * (totals.jobs != 1)}"]
    if totals.unfit:
        verb = "does not fit" if totals.unfit == 1 else "do not fit"
        parts.append(f"{totals.unfit} {verb} (skipped with launch.refuse_unfit=true)")
    timed = totals.jobs - totals.unfit - totals.untimed
    if timed:
        parts.append(f"{format_seconds(totals.seconds)} in sequence")
    if packed_makespan is not None and timed:
        slots, seconds = packed_makespan
        parts.append(f"{format_seconds(seconds)} on {slots} slot{'s' * (slots != 1)}")
    if totals.dollars is not None:
        parts.append(format_dollars(totals.dollars))
    if totals.untimed:
        parts.append(f"{totals.untimed} without a predicted time")
    console = get_console()
    console.print()
    console.print("; ".join(parts), soft_wrap=True)
    if totals.unrated:
        console.print(NO_TIME, style="dim", soft_wrap=True)


def train_command(run: RunConfig, overrides: Sequence[str]) -> str:
    """Return the command that trains ``run`` with ``overrides`` added."""
    return command_line("train", replace_overrides(run.overrides, overrides))


def _breakdown_table(plan: Plan) -> Table:
    breakdown = plan.fit.breakdown
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("memory breakdown")
    table.add_column("at peak", justify="right")
    table.add_column("maximum", justify="right")
    table.add_column("formula", style="dim")
    table.add_column("meaning", style="dim")
    entries = sorted(breakdown.entries, key=lambda it: -it.bytes.get(breakdown.peak_phase, 0))
    small_bytes = 0
    for entry in entries:
        at_peak = entry.bytes.get(breakdown.peak_phase, 0)
        if entry.max_bytes < SMALL_SHARE * breakdown.peak:
            small_bytes += at_peak
            continue
        text = format_bytes(at_peak) if at_peak else MISSING
        table.add_row(entry.title, text, format_bytes(entry.max_bytes), entry.formula, entry.reason)
    if small_bytes:
        table.add_row("other", format_bytes(small_bytes), "", "", "entries below 0.1% of the peak")
    return table


def print_fit(plan: Plan) -> None:
    """Print the fit status of a run and the suggested fix."""
    console = get_console()
    fit = plan.fit
    if fit.capacity is None or fit.margin is None:
        console.print(
            "Fit unknown: the hardware profile has no device memory; set hardware.memory_gib",
            style="dim",
        )
        return
    if fit.status is FitStatus.host_out_of_memory and fit.host_breakdown is not None:
        console.print(
            f"Main memory of a node: {format_bytes(fit.host_breakdown.peak)} exceeds "
            f"{format_bytes(fit.host_capacity)} by "
            f"{format_bytes(fit.host_breakdown.peak - fit.host_capacity)}"
        )
    capacity = format_bytes(fit.capacity)
    if fit.margin >= 0:
        text = f"{format_bytes(fit.margin)} of {capacity} device memory free"
    else:
        text = f"{format_bytes(-fit.margin)} more than the {capacity} of device memory"
    console.print(styled_text((STATUS_TITLES[fit.status], STYLES[fit.status]), f": {text}"))
    if fit.status is FitStatus.fits:
        return
    fix = plan.suggested_fix
    if fix is None and plan.run.objective.is_user_defined:
        return
    if fix is None:
        hint = "" if plan.run.objective.trace_only else "; plan.search=all tries more"
        console.print(f"No suggested fix: no change that was tried fits{hint}")
    else:
        note = "; train applies it (plan.fit=auto)" * (plan.run.plan.fit is UnfitPolicy.auto)
        console.print(f"Suggested fix: {fix.override_text}{note}", soft_wrap=True)
        console.print(train_command(plan.run, fix.overrides), style="dim", soft_wrap=True)


def _print_host_and_disk(console: Console, plan: Plan) -> None:
    """Print the main memory of a node and the disk space of checkpoints."""
    run, host = plan.run, plan.fit.host_breakdown or node_memory(plan.run)
    if run.hardware.device is DeviceKind.cuda:
        largest = sorted(host.entries, key=lambda entry: -entry.max_bytes)
        parts = ", ".join(f"{entry.title} {format_bytes(entry.max_bytes)}" for entry in largest)
        capacity, note = f" of {format_bytes(plan.fit.host_capacity)}", ""
        if plan.fit.host_breakdown is None:
            capacity, note = "", "; not checked: set hardware.host_memory_gib"
        text = f"Main memory of a node: {format_bytes(host.peak)}{capacity} ({parts}){note}"
        console.print(text, soft_wrap=True)
    size, keep = checkpoint_bytes(run), run.checkpoint.keep + run.checkpoint.best
    text = f"Checkpoint size: {format_bytes(size)}"
    if run.checkpoint.every and run.checkpoint.keep:
        text += f"; {format_bytes(keep * size)} for {keep} kept checkpoints"
    if run.hardware.disk_gb_per_s:
        text += f"; write time {format_seconds(size / run.hardware.disk_gb_per_s / GIGA)}"
    console.print(text)


def _print_time(console: Console, plan: Plan) -> None:
    step, interval = plan.step_time, plan.step_seconds_range
    if step is None or interval is None:
        console.print(NO_TIME, style="dim")
        return
    low, high = map(format_seconds, interval)
    rates, ranks = f"{plan.tokens_per_s:,.0f} tok/s", plan.run.world_size
    if ranks > 1 and plan.tokens_per_s is not None:
        rates += f" ({plan.tokens_per_s / ranks:,.0f} per device)"
    if plan.mfu is not None and plan.mfu_palm is not None:
        rates += f", {format_mfu(plan.mfu, plan.mfu_palm)}"
    console.print()
    console.print(f"Step time: {format_seconds(step.seconds)} ({low} to {high}), {rates}")
    if plan.run.hardware.read_off == BUILT_IN:
        console.print(f"from {BUILT_IN}; {CALIBRATE}", style="dim", soft_wrap=True)
    shares = [
        f"{step_part_title(name)} {seconds / step.seconds:.0%}"
        for name, seconds in step.parts().items()
        if seconds >= 0.005 * step.seconds
    ]
    console.print(", ".join(shares), style="dim")
    collectives = [
        f"{name} {format_seconds(seconds)}"
        for name, seconds in predict_collective_seconds(plan.run).items()
        if seconds >= 0.005 * step.seconds
    ]
    if collectives:
        overlapped = format_seconds(step.overlapped_communication)
        text = f"Collectives, of which {overlapped} overlap with compute: "
        console.print(text + ", ".join(collectives), style="dim", soft_wrap=True)
    if hint := bottleneck_hint(plan):
        console.print(hint, style="yellow", soft_wrap=True)
    if missing := host_memory.missing_rates(plan.run):
        options = " and ".join(f"hardware.{name}" for name in missing)
        console.print(
            f"Not included: transfer time of offloaded data; set {options}", style="yellow"
        )
    for until_step, step_tokens in plan.run.tokens_in_step.stages:
        text = f"{plan.run.samples_per_step.at(until_step - 1)} samples"
        if plan.run.trainer.sequence_warmup:
            text += f" of {plan.run.sequence_per_step.at(until_step - 1)} tokens"
        seconds = format_seconds(plan.stage_seconds[step_tokens])
        console.print(f"Until step {until_step:,}: {text} in a step, {seconds}")
    parts = [_training_time_text(plan)]
    dollars, kwh = plan.dollars_for(1e9), plan.kwh_for(1e9)
    if dollars is not None:
        parts.append(f"{format_dollars(dollars)} per billion tokens")
    if kwh is not None:
        parts.append(f"{kwh:,.0f} kWh per billion tokens")
    console.print(", ".join(parts))


def _training_time_text(plan: Plan) -> str:
    """Predicted time of the whole run, or why it is unknown."""
    run, seconds = plan.run, training_seconds(plan)
    if seconds is None:
        epochs = f"trainer.max_epochs={run.trainer.max_epochs or 0:g}"
        return f"Training time not predicted: the steps of {epochs} depend on the data"
    tokens = run.tokens_in_step.before(run.num_steps(samples=0))
    return f"Training time: {format_seconds(seconds)} for {format_count(tokens)} tokens"
