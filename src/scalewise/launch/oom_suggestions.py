"""What to change in a run that died of memory, so that it takes clearly less."""

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

MIN_SAVING = 0.8
"""What a cure takes at the most of the peak of a run that was foreseen to fit, and died."""
MAX_SUGGESTIONS = 3
"""Cures that are told."""
SIMPLE_CHANGES = (
    (micro_batch_changes, "Half the activations; the global batch stays as it is."),
    (precision_changes, "Activations in half the bytes."),
)
"""What helps a run without a ledger, and why."""


def oom_suggestions(run: RunConfig) -> list[tuple[str, str]]:
    """Returns overrides that save memory and compose with the run, each with why."""
    try:
        if run.objective.trace_only:
            return list(_is_simple(run))
        was, found = check_fit(run).peak, list(islice(_cheapest_changes(run), MAX_SUGGESTIONS))
    except Exception:  # a job's end is written, whatever the ledger makes of the job
        return []
    return [
        (
            fix.override_text,
            f"Peak foreseen: {format_bytes(fix.fit.peak)} in place of {format_bytes(was)}.",
        )
        for fix in found
    ]


def _cheapest_changes(run: RunConfig) -> Iterator[SuggestedFix]:
    """Yields the cheapest change of each kind; where none does alone, the cheapest of several."""
    was = check_fit(run)
    most = was.peak * (
        MIN_SAVING if was.status.is_acceptable else 1.0
    )  # what foresaw the death is believed
    on_cpu = run.hardware.device is DeviceKind.cpu

    def judge(changed: RunConfig) -> FitReport | None:
        if on_cpu and changed.world_size > run.world_size:  # they share the machine's memory
            return None
        fit = check_fit(changed)
        return fit if fit.peak <= most else None

    seen: set[frozenset[str]] = set()
    for fix in suggest_fixes(run, judge, max_changes=1):
        kinds = fix.changes[0].kinds
        if kinds not in seen and _is_appendable(fix, run):
            seen.add(kinds)
            yield fix
    if not seen:
        yield from islice((fix for fix in suggest_fixes(run, judge) if _is_appendable(fix, run)), 1)


def _is_appendable(fix: SuggestedFix, run: RunConfig) -> bool:
    """Returns whether a line goes behind what was typed, of which no option then lacks a field."""
    told = override_keys(fix.overrides)
    options = tuple(f"{key}." for key in told)
    return not any(key.startswith(options) for key in override_keys(run.overrides) - told)


def _is_simple(run: RunConfig) -> Iterator[tuple[str, str]]:
    for changes, why in SIMPLE_CHANGES:
        lines = (
            change.override_text for change in changes(run) if not any(change.apply(run).validate())
        )
        yield from ((line, why) for line in islice(lines, 1))
