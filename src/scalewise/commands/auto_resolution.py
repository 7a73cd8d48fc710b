"""Resolve ``auto`` values of a run before it starts: fit, activation checkpointing, micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import external_launcher
from scalewise.memory_config import AutoCheckpointing
from scalewise.plan_config import PlanSearch, UnfitPolicy
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, MICRO_BATCH_KEY
from scalewise.units import format_bytes

if TYPE_CHECKING:
    from scalewise.planner.auto_settings import MicroBatchChoice


def resolve_auto(
    run: RunConfig, *, no_probe_reason: str = ""
) -> tuple[RunConfig, MicroBatchChoice | None]:
    """Return the run with ``auto`` values resolved, and the choice of the micro-batch size.

    Args:
        run: Requested run.
        no_probe_reason: Reason why no probe run can start on this machine.

    Raises:
        ConfigError: The run does not fit and no change helps.
    """
    if run.plan.fit is not UnfitPolicy.none:
        run = _with_overrides(run, _fit_overrides(_on_available_devices(run)))
    if isinstance(run.memory, AutoCheckpointing):
        from scalewise.planner.auto_settings import resolve_auto_checkpointing
        from scalewise.planner.fit_check import RunVariant

        run = _with_overrides(run, resolve_auto_checkpointing(RunVariant(run)).overrides)
    if run.trainer.micro_batch != AUTO:
        return run, None
    choice = _resolve_micro_batch(run, no_probe_reason)
    return _with_overrides(run, choice.overrides), choice


def _resolve_micro_batch(run: RunConfig, no_probe_reason: str) -> MicroBatchChoice:
    from scalewise.launch import memory_probe_run
    from scalewise.planner.auto_settings import choose_by_probes

    if external_launcher.is_external_rank():
        no_probe_reason = "not probed: ranks were started by torchrun or srun"

    def probe(candidate: RunConfig) -> str:
        print_lines(f"{MICRO_BATCH_KEY}={AUTO}: probing {candidate.micro_batch} ...")
        return memory_probe_run.probe_status(candidate)

    return choose_by_probes(run, None if no_probe_reason else probe, no_probe_reason)


def _with_overrides(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    from scalewise.typed_override import replace_overrides

    return compose(replace_overrides(run.overrides, overrides)) if overrides else run


def resolve_auto_all(
    runs: Sequence[RunConfig], *, no_probe_reason: str = ""
) -> list[tuple[RunConfig, MicroBatchChoice | None]]:
    """Resolve each of ``runs``; raise ``ConfigError`` with the issues of all of them."""
    resolved: list[tuple[RunConfig, MicroBatchChoice | None]] = []
    issues: list[ConfigIssue] = []
    for index, run in enumerate(runs):
        try:
            resolved.append(resolve_auto(run, no_probe_reason=no_probe_reason))
        except ConfigError as error:
            issues += [
                replace(issue, reason=f"job {index}: {issue.reason}") for issue in error.issues
            ]
    if issues:
        raise ConfigError(issues)
    return resolved


def _fit_overrides(run: RunConfig) -> tuple[str, ...]:
    # Imported on demand: most runs resolve nothing.
    from scalewise.planner.plan import build_plan
    from scalewise.planner.search import search_runs

    plan = build_plan(run)
    if run.plan.search is not PlanSearch.none:
        result = search_runs(run)
        if plan.fit.status.is_acceptable and result.rank_by is not run.plan.rank_by:
            return ()  # the run fits, and the search cannot rank by the requested quantity
        if (best := result.best) is not None:
            return best.overrides
    elif plan.fit.status.is_acceptable:
        return ()
    elif plan.suggested_fix is not None:
        return plan.suggested_fix.overrides
    needed, capacity = format_bytes(plan.fit.reserved[1]), format_bytes(plan.fit.capacity or 0)
    reason = f"needs {needed} of {capacity}, and no change that was tried fits"
    fix = "see `scalewise plan` with the same overrides, or set plan.fit=none"
    raise ConfigError.for_key("plan.fit", run.plan.fit.value, reason, fix)


def _on_available_devices(run: RunConfig) -> RunConfig:
    """Return the run on all devices of the profile, or else of this machine."""
    hardware = run.hardware
    if hardware.total_devices is not None:
        return run
    num_devices = len(this_machine().gpus) if hardware.device is DeviceKind.cuda else 1
    return replace(
        run, hardware=replace(hardware, devices_per_node=max(run.world_size, num_devices))
    )
