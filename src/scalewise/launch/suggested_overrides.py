"""Overrides that may fix a failed run, for its status and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from scalewise.hardware import DeviceKind
from scalewise.launch.outcomes import Outcome
from scalewise.planner.fit_check import FitReport, RunVariant, check_fit
from scalewise.planner.suggested_fix import (
    SuggestedFix,
    micro_batch_changes,
    precision_changes,
    suggest_fixes,
)
from scalewise.run_config import RunConfig
from scalewise.typed_override import override_keys
from scalewise.units import format_bytes

MAX_PEAK_FRACTION = 0.8
"""Maximum peak of a fix, as a fraction of the peak of a run that was predicted to fit."""
MAX_SUGGESTIONS = 3
"""Maximum number of suggestions."""
SIMPLE_CHANGES = (
    (micro_batch_changes, "Halves activation memory; the global batch size does not change."),
    (precision_changes, "Halves the bytes of activations."),
)
"""Suggestions without a memory breakdown, with their effect."""


def suggested_overrides(
    outcome: Outcome, run: RunConfig, *, has_checkpoint: bool
) -> list[dict[str, str]]:
    """Overrides that may fix a failure, with their effect.

    ``has_checkpoint``: whether the run saved a checkpoint.
    """
    suggestions: list[tuple[str, str]] = []
    if outcome.status == "out_of_memory":
        suggestions += _oom_suggestions(run)
        if run.launch.memory_limit_gib is not None:
            suggestions.append(
                ("launch.memory_limit_gib=null", "Removes the memory limit of the job.")
            )
    elif outcome.status == "timeout" and run.launch.timeout is not None:
        longer_timeout = f"launch.timeout={run.launch.timeout * 2:g}"
        suggestions.append(
            (longer_timeout, "Doubles the time limit, for a job that is slow and does not hang.")
        )
        if run.checkpoint.every is None:
            suggestions.append(("checkpoint.every=100", "Saves checkpoints to resume from."))
    elif "lower optimizer.lr" in outcome.reason and not run.objective.is_user_defined:
        lr = getattr(run.optimizer, "lr", 0.0)
        suggestions.append((f"optimizer.lr={lr / 3:.1g}", "Divides the learning rate by 3."))
    elif outcome.status == "interrupted" and has_checkpoint:
        suggestions.append(("resume=last", "Resumes from the newest checkpoint."))
    return [{"override": override, "why": why} for override, why in suggestions]


def _oom_suggestions(run: RunConfig) -> list[tuple[str, str]]:
    """Overrides that reduce memory and compose with those of the run, with their effect."""
    try:
        if run.objective.trace_only:
            return list(_simple_suggestions(run))
        peak, fixes = check_fit(run).peak, list(islice(_cheapest_changes(run), MAX_SUGGESTIONS))
    except Exception:  # a failed prediction must not prevent the status from being written
        return []
    return [
        (
            fix.override_text,
            f"Predicted peak: {format_bytes(fix.fit.peak)} instead of {format_bytes(peak)}.",
        )
        for fix in fixes
    ]


def _cheapest_changes(run: RunConfig) -> Iterator[SuggestedFix]:
    """Yield the cheapest change of each kind; without one, the cheapest combination of changes."""
    fit_before = check_fit(run)
    # A prediction of running out of memory is trusted; another one needs a margin.
    max_peak = fit_before.peak * (MAX_PEAK_FRACTION if fit_before.status.is_acceptable else 1.0)
    on_cpu = run.hardware.device is DeviceKind.cpu

    def accept(changed_run: RunConfig) -> FitReport | None:
        if on_cpu and changed_run.world_size > run.world_size:  # ranks on the CPU share main memory
            return None
        fit = check_fit(changed_run)
        return fit if fit.peak <= max_peak else None

    seen_kinds: set[frozenset[str]] = set()
    for fix in suggest_fixes(run, accept, max_changes=1):
        kinds = fix.changes[0].kinds
        if kinds not in seen_kinds and _is_appendable(fix, run):
            seen_kinds.add(kinds)
            yield fix
    if not seen_kinds:
        yield from islice(
            (fix for fix in suggest_fixes(run, accept) if _is_appendable(fix, run)), 1
        )


def _is_appendable(fix: SuggestedFix, run: RunConfig) -> bool:
    """Whether the overrides can follow those of the run without invalidating one of them."""
    keys = override_keys(fix.overrides)
    options = tuple(f"{key}." for key in keys)
    return not any(key.startswith(options) for key in override_keys(run.overrides) - keys)


def _simple_suggestions(run: RunConfig) -> Iterator[tuple[str, str]]:
    for changes, effect in SIMPLE_CHANGES:
        overrides = (
            " ".join(change.overrides)
            for change in changes(run)
            if change.apply(RunVariant(run)).is_valid
        )
        yield from ((override, effect) for override in islice(overrides, 1))
