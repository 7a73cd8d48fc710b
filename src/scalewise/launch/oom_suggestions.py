"""Suggested fixes for a run that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from scalewise.hardware import DeviceKind
from scalewise.planner.fit_check import FitReport, check_fit
from scalewise.planner.override_edit import override_keys
from scalewise.planner.suggested_fix import (
    SuggestedFix,
    micro_batch_changes,
    precision_changes,
    suggest_fixes,
)
from scalewise.run_config import RunConfig
from scalewise.units import format_bytes
from scalewise.validation.run_issues import iter_issues

MAX_PEAK_FRACTION = 0.8
"""Maximum peak of a fix, as a fraction of the peak of a run that was predicted to fit."""
MAX_SUGGESTIONS = 3
"""Maximum number of suggestions."""
SIMPLE_CHANGES = (
    (micro_batch_changes, "Halves activation memory; the global batch size does not change."),
    (precision_changes, "Halves the bytes of activations."),
)
"""Suggestions without a memory breakdown, with their effect."""


def oom_suggestions(run: RunConfig) -> list[tuple[str, str]]:
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
            change.override_text
            for change in changes(run)
            if not any(iter_issues(change.apply(run)))
        )
        yield from ((override, effect) for override in islice(overrides, 1))
