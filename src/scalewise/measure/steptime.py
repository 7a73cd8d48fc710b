"""Where the time of a step goes: marks on the device's own clock, read once per window."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import torch

from scalewise.tracking.metric_names import TIMES

OTHER = "other"
"""Validation, checkpoints and logging: no part of a step."""


class StepTimer:
    """Collects phases of steps. A mark ends the phase before it.

    On CUDA a mark is an event on the current stream: nothing waits until ``drain``.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._finished_steps: list[list[tuple[str, float | torch.cuda.Event]]] = []

    def mark(self, phase: str) -> None:
        """Says that ``phase`` begins now."""
        self._marks.append((phase, self._now()))

    def end_step(self) -> None:
        """Says that an optimizer step ended and the next began, with callbacks first."""
        self.mark("optimizer")
        self._finished_steps.append(self._marks)
        self._marks = self._marks[-1:]

    def drain(self) -> list[dict[str, float]]:
        """Returns the seconds of each phase marked in it, for every step ended since the last."""
        if self._cuda and self._finished_steps:
            torch.cuda.synchronize()
        steps = [self._seconds(marks) for marks in self._finished_steps]
        self._finished_steps = []
        return steps

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: list[tuple[str, float | torch.cuda.Event]]) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for (phase, start), (_, end) in pairwise(marks):
            spent[phase] += _elapsed(start, end)
        return {phase: spent[phase] for phase in TIMES if phase in spent}


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
