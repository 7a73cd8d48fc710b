"""Whether changes make a run fit that is known by trace alone: each takes seconds."""

from __future__ import annotations

from scalewise import console
from scalewise.planner.fit_check import FitReport, compare_with_hardware
from scalewise.run_config import RunConfig
from scalewise.training import fake_tensor_trace

TRACES = 24
"""So many runs are traced at the most."""


class TraceFitCheck:
    """Traces one run after the other, but none of which another has shown that it cannot fit."""

    def __init__(self) -> None:
        self._remaining_traces = TRACES
        self._rejected_kinds: list[tuple[object, ...]] = []

    def __call__(self, run: RunConfig) -> FitReport | None:
        """Returns how ``run`` stands against its hardware; None: it is not traced."""
        kind = (run.parallelism, run.precision, run.optimizer, run.adapter)
        if (
            not self._remaining_traces
            or kind in self._rejected_kinds
            or fake_tensor_trace.rejection_reason(run) is not None
        ):
            return None
        self._remaining_traces -= 1
        with console.get_console().status(
            f"tracing what would fit, {self._remaining_traces} more at the most"
        ):
            found = fake_tensor_trace.trace_run(run, full_depth=True)
        fit = compare_with_hardware(run, found.build_breakdown())
        # Neither smaller passes nor recomputation make less of what lasts.
        if fit.capacity is not None and found.persistent_bytes > fit.capacity:
            self._rejected_kinds.append(kind)
        return fit
