"""Time of each phase of a step, measured with CUDA events or a CPU clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch

from scalewise.metric_names import STEP_PHASES

OTHER = "other"
"""Phase of validation, checkpoints and logging, which are no part of a step."""


class StepTimer:
    """Measure the phases of steps; each mark ends the previous phase.

    On CUDA, a mark is an event on the current stream; only ``drain`` synchronizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._now: Callable[[], float | torch.cuda.Event] = (
            _recorded_event if self._cuda else time.perf_counter
        )
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._finished_steps: list[list[tuple[str, float | torch.cuda.Event]]] = []

    def mark(self, phase: str) -> None:
        """Mark the start of ``phase``."""
        self._marks.append((phase, self._now()))

    def end_step(self) -> None:
        """Mark the end of an optimizer step."""
        self.mark("optimizer")
        self._finished_steps.append(self._marks)
        self._marks = self._marks[-1:]

    def drain(self) -> list[dict[str, float]]:
        """Return the seconds by phase of each step since the last call."""
        if self._cuda and self._finished_steps:
            torch.cuda.synchronize()
        steps = [self._seconds(marks) for marks in self._finished_steps]
        self._finished_steps = []
        return steps

    def _seconds(self, marks: list[tuple[str, float | torch.cuda.Event]]) -> dict[str, float]:
        seconds_by_phase: dict[str, float] = defaultdict(float)
        for (phase, start), (_, end) in pairwise(marks):
            seconds_by_phase[phase] += _elapsed(start, end)
        return {
            phase: seconds_by_phase[phase] for phase in STEP_PHASES if phase in seconds_by_phase
        }


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
