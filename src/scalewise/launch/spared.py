"""What to change in a run that died of memory, so that it takes clearly less."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from scalewise.hardware import DeviceKind
from scalewise.plan.cure import Cure, cures, of_passes, of_precision
from scalewise.plan.line import typed_keys
from scalewise.plan.verdict import Fit, judged
from scalewise.run import Run
from scalewise.units import bytes_text

SHARE = 0.8
"""What a cure takes at the most of the peak of a run that was foreseen to fit, and died."""
MOST = 3
"""Cures that are told."""
SIMPLE = (
    (of_passes, "Half the activations; the global batch stays as it is."),
    (of_precision, "Activations in half the bytes."),
)
"""What helps a run without a ledger, and why."""


def told(run: Run) -> list[tuple[str, str]]:
    """Returns overrides that save memory and compose with the run, each with why."""
    try:
        if run.objective.by_trace:
            return list(_simple(run))
        was, found = judged(run).peak, list(islice(_found(run), MOST))
    except Exception:  # a job's end is written, whatever the ledger makes of the job
        return []
    return [
        (cure.line, f"Peak foreseen: {bytes_text(cure.fit.peak)} in place of {bytes_text(was)}.")
        for cure in found
    ]


def _found(run: Run) -> Iterator[Cure]:
    """Yields the cheapest change of each kind; where none does alone, the cheapest of several."""
    was = judged(run)
    most = was.peak * (SHARE if was.verdict.good else 1.0)  # what foresaw the death is believed
    on_cpu = run.hardware.device is DeviceKind.cpu

    def judge(changed: Run) -> Fit | None:
        if on_cpu and changed.world_size > run.world_size:  # they share the machine's memory
            return None
        fit = judged(changed)
        return fit if fit.peak <= most else None

    seen: set[frozenset[str]] = set()
    for cure in cures(run, judge, together=1):
        kinds = cure.changes[0].kinds
        if kinds not in seen and _adds(cure, run):
            seen.add(kinds)
            yield cure
    if not seen:
        yield from islice((cure for cure in cures(run, judge) if _adds(cure, run)), 1)


def _adds(cure: Cure, run: Run) -> bool:
    """Returns whether a line goes behind what was typed, of which no option then lacks a field."""
    told = typed_keys(cure.told)
    options = tuple(f"{key}." for key in told)
    return not any(key.startswith(options) for key in typed_keys(run.overrides) - told)


def _simple(run: Run) -> Iterator[tuple[str, str]]:
    for changes, why in SIMPLE:
        lines = (change.line for change in changes(run) if not any(change.make(run).complaints()))
        yield from ((line, why) for line in islice(lines, 1))
