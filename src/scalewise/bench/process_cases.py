"""Cases that compare processes and jobs: start of the command line, jobs of a sweep, resumption."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scalewise.bench import sweep
from scalewise.bench.comparison import MeasuredCase, compare_in_turn, ratio_entry
from scalewise.bench.paired_ratio import paired_ratio
from scalewise.bench.suite import CaseError, Entry
from scalewise.checkpoints import manifest
from scalewise.launch.job import JobSpec, execute
from scalewise.run_config import RunConfig

IMPORT_TORCH = ("-c", "import torch")
"""Baseline of the start of a command."""
SAVED_STEP = 2
"""Step of the checkpoint that is resumed."""


@dataclass(frozen=True)
class CommandCase(MeasuredCase):
    """Duration of a command next to a process that imports torch."""

    arguments: tuple[str, ...]
    """Arguments of ``python -m scalewise`` before the overrides of the run."""
    pairs: int
    """Number of measured commands, each between two processes that import torch."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Run the processes in ``folder``; return the ratio of their durations."""
        folder.mkdir(parents=True)
        command = ("-m", "scalewise", *self.arguments, *run.overrides)
        return compare_in_turn(
            self.pairs,
            lambda: _process_seconds(IMPORT_TORCH, folder),
            lambda: _process_seconds(command, folder),
            "`import torch`",
        )


@dataclass(frozen=True)
class WarmJobCase(MeasuredCase):
    """Overhead of a job of a sweep next to that of a fresh process."""

    pairs: int
    """Number of jobs, each between two fresh processes; even."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Run jobs and fresh processes in turn; return the ratio of their overheads."""
        warm, fresh = sweep.measure_overheads(run, self.pairs, folder)
        fresh_s = [overhead.job for overhead in fresh]
        warm_s = [overhead.job for overhead in warm]
        self_check = paired_ratio(fresh_s[1::2], fresh_s[::2]).median
        return ratio_entry(warm_s, fresh_s, self_check, "a fresh process")


@dataclass(frozen=True)
class ResumeCase(MeasuredCase):
    """Duration of a job that resumes and trains one step, next to a job of one step."""

    pairs: int
    """Number of resumed jobs, each between two that start from scratch."""

    def measure(self, run: RunConfig, folder: Path) -> Entry:
        """Run the jobs in this process in turn; return the ratio of their durations."""
        saving = replace(run.checkpoint, at_end=True)
        source = _with_steps(replace(run, checkpoint=saving), SAVED_STEP)
        _job_seconds(source, folder / "source")
        checkpoint = manifest.newest_checkpoint(folder / "source" / "checkpoints")
        scratch = _with_steps(run, 1)
        resumed = replace(_with_steps(run, SAVED_STEP + 1), resume=str(checkpoint))
        number = 0

        def job_seconds(job_run: RunConfig) -> float:
            nonlocal number
            number += 1
            return _job_seconds(job_run, folder / str(number))

        _job_seconds(resumed, folder / "warm_up")
        return compare_in_turn(
            self.pairs,
            lambda: job_seconds(scratch),
            lambda: job_seconds(resumed),
            "a job from scratch",
            parameters=run.model.num_parameters,
        )


def _process_seconds(arguments: Sequence[str], folder: Path) -> float:
    """Duration of a Python process, in seconds."""
    start = time.perf_counter()
    result = subprocess.run(  # noqa: S603 (fixed arguments)
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    seconds = time.perf_counter() - start
    if result.returncode:
        raise CaseError("failed", f"{' '.join(arguments)}: {result.stderr.strip()[-500:]}")
    return seconds


def _job_seconds(run: RunConfig, folder: Path) -> float:
    start = time.perf_counter()
    result = execute(JobSpec(run), folder)
    seconds = time.perf_counter() - start
    if result.status != "ok":
        raise CaseError(result.status, result.reason)
    return seconds


def _with_steps(run: RunConfig, steps: int) -> RunConfig:
    return replace(run, trainer=replace(run.trainer, max_steps=steps))
