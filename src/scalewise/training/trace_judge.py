"""Whether changes make a run fit that is known by trace alone: each takes seconds."""

from __future__ import annotations

from scalewise import output
from scalewise.plan.verdict import Fit, against
from scalewise.run import Run
from scalewise.training import trace

TRACES = 24
"""So many runs are traced at the most."""


class TraceJudge:
    """Traces one run after the other, but none of which another has shown that it cannot fit."""

    def __init__(self) -> None:
        self._left = TRACES
        self._too_large: list[tuple[object, ...]] = []

    def __call__(self, run: Run) -> Fit | None:
        """Returns how ``run`` stands against its hardware; None: it is not traced."""
        kind = (run.parallelism, run.precision, run.optimizer, run.adapter)
        if not self._left or kind in self._too_large or trace.refusal(run) is not None:
            return None
        self._left -= 1
        with output.console().status(f"tracing what would fit, {self._left} more at the most"):
            found = trace.traced(run, whole=True)
        fit = against(run, found.ledger())
        # Neither smaller passes nor recomputation make less of what lasts.
        if fit.capacity is not None and found.lasting > fit.capacity:
            self._too_large.append(kind)
        return fit
