"""What a run leaves open by ``auto`` is chosen before it starts: what fits, memory, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import AutoCheckpointing
from scalewise.config.compose import compose
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind, this_machine
from scalewise.launch import external_launcher
from scalewise.planner.config import PlanSearch, UnfitPolicy
from scalewise.run_config import RunConfig
from scalewise.trainer_config import AUTO, SIZE
from scalewise.units import format_bytes

if TYPE_CHECKING:
    from scalewise.planner.auto_micro_batch import MicroBatchChoice


def resolve_auto(
    run: RunConfig, *, no_probe_reason: str = ""
) -> tuple[RunConfig, MicroBatchChoice | None]:
    """Returns the run that starts in place of ``run``, and how its micro batch was found.

    ``no_probe_reason``: why no run can be tried here. Raises ``ConfigError`` where that does not
    fit and nothing helps.
    """
    if run.plan.fit is not UnfitPolicy.none:
        run = _with_overrides(run, _fit_overrides(_on_available_devices(run)))
    if isinstance(run.memory, AutoCheckpointing):
        from scalewise.planner.auto_checkpointing import resolve_auto_checkpointing

        run = _with_overrides(run, resolve_auto_checkpointing(run)[1])
    if run.trainer.micro_batch != AUTO:
        return run, None
    found = _resolve_micro_batch(run, no_probe_reason)
    return _with_overrides(run, found.overrides), found


def _resolve_micro_batch(run: RunConfig, no_probe_reason: str) -> MicroBatchChoice:
    from scalewise.launch import memory_probe_run
    from scalewise.planner.auto_micro_batch import choose_by_probes

    if external_launcher.is_external_rank():
        no_probe_reason = "not tried, as these ranks were started by torchrun or srun"

    def ends(tried: RunConfig) -> str:
        print_lines(f"{SIZE}={AUTO}: trying {tried.micro_batch} ...")
        return memory_probe_run.probe_status(tried)

    return choose_by_probes(run, None if no_probe_reason else ends, no_probe_reason)


def _with_overrides(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    from scalewise.planner.override_edit import replace_overrides

    return compose(replace_overrides(run.overrides, overrides)) if overrides else run


def resolve_auto_all(
    runs: Sequence[RunConfig], *, no_probe_reason: str = ""
) -> list[tuple[RunConfig, MicroBatchChoice | None]]:
    """Returns what ``fitted`` does of each of ``runs``; raises with every complaint."""
    fit: list[tuple[RunConfig, MicroBatchChoice | None]] = []
    issues: list[ConfigIssue] = []
    for number, run in enumerate(runs):
        try:
            fit.append(resolve_auto(run, no_probe_reason=no_probe_reason))
        except ConfigError as error:
            issues += [
                replace(issue, reason=f"job {number}: {issue.reason}") for issue in error.issues
            ]
    if issues:
        raise ConfigError(issues)
    return fit


def _fit_overrides(run: RunConfig) -> tuple[str, ...]:
    # Most runs ask for none of this, and it takes its time to import.
    from scalewise.planner.plan import build_plan
    from scalewise.planner.search import search_runs

    plan = build_plan(run)
    if run.plan.search is not PlanSearch.none:
        found = search_runs(run)
        if plan.fit.status.is_acceptable and found.rank_by is not run.plan.rank_by:
            return ()  # it fits, and nothing is known that would be better
        if (best := found.best) is not None:
            return best.overrides
    elif plan.fit.status.is_acceptable:
        return ()
    elif plan.suggested_fix is not None:
        return plan.suggested_fix.overrides
    needed, there = format_bytes(plan.fit.reserved[1]), format_bytes(plan.fit.capacity or 0)
    reason = f"needs {needed} of {there}, and no change that was tried makes it fit"
    fix = "see `scalewise plan` with the same line, or set plan.fit=none"
    raise ConfigError.for_key("plan.fit", run.plan.fit.value, reason, fix)


def _on_available_devices(run: RunConfig) -> RunConfig:
    """Returns the run with as many devices as may be used: those of the profile, or those here."""
    hardware = run.hardware
    if hardware.total_devices is not None:
        return run
    here = len(this_machine().gpus) if hardware.device is DeviceKind.cuda else 1
    return replace(run, hardware=replace(hardware, devices_per_node=max(run.world_size, here)))
