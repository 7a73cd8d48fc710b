"""Goodput: fraction of the wall time of a run, over all of its attempts, that trains its model.

Rank 0 appends a line to ``attempts.jsonl`` at each log interval. The time of a killed attempt after
its last line counts as waiting for the next attempt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path

from scalewise import regular_files
from scalewise.run_files import append_text

ATTEMPTS_FILE = "attempts.jsonl"
"""Progress of all attempts at a run, in its folder."""
CAUSES = {
    "start": "Start: processes, data, model, validation before the first step",
    "first_step": "First step beyond the mean of the others: compilation, allocation",
    "validation": "Validation",
    "checkpoint": "Checkpoints, while training waits",
    "repeated": "Steps that a later attempt trained again",
    "between": "Between attempts",
    "other": "Logging and callbacks",
}
"""Causes of lost time."""


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt at the end of a log interval; times in seconds."""

    started: float
    """Start of the attempt, since 1970."""
    trained: float
    """Start of its first step, since 1970."""
    recorded: float
    """Time of this line, since 1970."""
    start_step: float
    """Step from which the attempt resumed; 0: from scratch."""
    step: float
    """Last optimizer step."""
    steps_s: float
    """Time of all steps of the attempt."""
    first_step_s: float
    """Time of its first step."""
    validation_s: float
    """Time of its validations."""
    checkpoint_s: float
    """Time in which training waited for checkpoints."""
    first_batch_steps: float = 0.0
    """Number of steps with the batch of the first one; 0: all, in lines of earlier versions."""
    first_batch_s: float = 0.0
    """Time of these steps."""


@dataclass(frozen=True)
class Goodput:
    """Useful time and lost time of a run, in seconds."""

    attempts: int
    """Number of attempts that took a step."""
    useful_s: float
    """Time of the steps that no later attempt trained again."""
    lost_s: Mapping[str, float]
    """Lost time by cause, as in ``CAUSES``."""

    @property
    def wall_s(self) -> float:
        """Time from the start of the first attempt to the last line of the last one."""
        return self.useful_s + sum(self.lost_s.values())

    @property
    def fraction(self) -> float:
        """Goodput: useful time over wall time."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def as_dict(self) -> dict[str, object]:
        """Content for ``summary.json``."""
        lost = {f"{cause}_s": seconds for cause, seconds in self.lost_s.items()}
        times = {"useful_s": self.useful_s, "wall_s": self.wall_s, **lost}
        return {"attempts": self.attempts, "fraction": self.fraction, **times}


def append_progress(folder: Path, progress: AttemptProgress) -> None:
    """Append a line to the ``attempts.jsonl`` of a run folder."""
    append_text(folder / ATTEMPTS_FILE, json.dumps(asdict(progress)) + "\n")


def read_attempts(folder: Path) -> list[list[AttemptProgress]]:
    """Lines of each attempt at the run in a folder, in order; damaged lines are left out."""
    try:
        lines = regular_files.read_text(folder / ATTEMPTS_FILE, errors="replace").splitlines()
    except OSError:
        return []
    attempts: dict[float, list[AttemptProgress]] = {}
    for line in lines:
        if (progress := _parse_progress(line)) is not None:
            attempts.setdefault(progress.started, []).append(progress)
    return list(attempts.values())


def _parse_progress(line: str) -> AttemptProgress | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    defaults = {it.name: it.default for it in fields(AttemptProgress)}
    numbers = {name: values.get(name, default) for name, default in defaults.items()}
    if not all(map(_is_number, numbers.values())):
        return None
    return AttemptProgress(**{name: float(number) for name, number in numbers.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def compute_goodput(attempts: Sequence[Sequence[AttemptProgress]]) -> Goodput | None:
    """Goodput of a run from the lines of its attempts; None without a step."""
    if not attempts:
        return None
    lost = dict.fromkeys(CAUSES, 0.0)
    useful = 0.0
    for number, lines in enumerate(attempts):
        last = lines[-1]
        later = (others[-1].start_step for others in attempts[number + 1 :])
        excess = _first_step_excess(last)
        steps_s = last.steps_s - excess
        repeated = steps_s - _time_at(lines, min(later, default=inf), excess)
        useful += steps_s - repeated
        lost["start"] += last.trained - last.started
        lost["first_step"] += excess
        lost["validation"] += last.validation_s
        lost["checkpoint"] += last.checkpoint_s
        lost["repeated"] += repeated
        accounted = last.steps_s + last.validation_s + last.checkpoint_s
        # Step times are those of the slowest rank.
        lost["other"] += max(0.0, last.recorded - last.trained - accounted)
    for previous, following in pairwise(attempts):
        lost["between"] += max(0.0, following[-1].started - previous[-1].recorded)
    return Goodput(len(attempts), useful, lost)


def _first_step_excess(last: AttemptProgress) -> float:
    """Time of the first step beyond the mean of others with its batch; 0 if there are none."""
    steps, seconds = last.first_batch_steps, last.first_batch_s
    if not steps:
        steps, seconds = last.step - last.start_step, last.steps_s
    if steps < 2:
        return 0.0
    return max(0.0, last.first_step_s - (seconds - last.first_step_s) / (steps - 1))


def _time_at(lines: Iterable[AttemptProgress], step: float, excess: float) -> float:
    """Time of the steps of an attempt up to ``step``, interpolated between its lines."""
    before, seconds = None, 0.0
    for line in lines:
        first = line.start_step if before is None else before.step
        if step <= first:
            break
        interval = line.steps_s - (excess if before is None else before.steps_s)
        covered = min(1.0, (step - first) / (line.step - first)) if line.step > first else 1.0
        seconds += interval * covered
        before = line
    return seconds
