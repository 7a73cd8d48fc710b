"""Fit check by tracing, for runs without an analytic memory model."""

from __future__ import annotations

from scalewise import plain_console
from scalewise.planner.fit_check import FitReport, compare_with_hardware
from scalewise.run_config import RunConfig
from scalewise.training import fake_tensor_trace

MAX_TRACES = 24
"""Maximum number of traces; each takes seconds."""


class TraceFitCheck:
    """Fit check that traces runs, except those that an earlier trace rules out."""

    def __init__(self) -> None:
        self._remaining_traces = MAX_TRACES
        self._rejected_kinds: list[tuple[object, ...]] = []

    def __call__(self, run: RunConfig) -> FitReport | None:
        """Fit of ``run`` on its hardware; None: the run is not traced."""
        kind = (run.parallelism, run.precision, run.optimizer, run.adapter)
        if (
            not self._remaining_traces
            or kind in self._rejected_kinds
            or fake_tensor_trace.rejection_reason(run) is not None
        ):
            return None
        self._remaining_traces -= 1
        with plain_console.get_console().status(
            f"tracing configs that may fit, at most {self._remaining_traces} more"
        ):
            trace = fake_tensor_trace.trace_run(run, full_depth=True)
        fit = compare_with_hardware(run, trace.build_breakdown())
        # Micro-batch size and activation checkpointing do not change persistent memory.
        if fit.capacity is not None and trace.persistent_bytes > fit.capacity:
            self._rejected_kinds.append(kind)
        return fit
