"""Where the jobs of a sweep run: an engine takes tasks and tells how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scalewise.launch import processes, signals
from scalewise.launch.job import JobSpec, Result, execute, needs_own_process
from scalewise.launch.outcomes import outcome_of_exception

INTERRUPTED = range(129, 160)
"""Exit codes of jobs that a signal to the whole sweep has ended."""


@dataclass(frozen=True)
class SweepTask:
    """One job of a sweep: its number, what it runs, and the folder that it is to have."""

    number: int
    job_spec: JobSpec
    folder: Path


Began = Callable[[SweepTask], None]


class Executor(Protocol):
    """What runs the jobs of a sweep."""

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: Began
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Yields each task with how it ended, as they end; calls ``on_start`` as each starts.

        No job stops another. After a signal to the sweep the task that it ended is yielded, and
        what had not begun is left out.
        """


def preload_modules(tasks: Sequence[SweepTask]) -> list[str]:
    """Returns the modules that the ranks of some job import: its fork server may, once."""
    return sorted({name for task in tasks for name in task.job_spec.run.imports})


class SequentialExecutor:
    """One job after the other, each in processes of its own."""

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: Began
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Yields each task with how it ended."""
        if any(needs_own_process(task.job_spec) for task in tasks):
            processes.start_forkserver(preload_modules(tasks))
        for task in tasks:
            result = execute_task(task, on_start)
            yield task, result
            if result.exit_code in INTERRUPTED:
                return


def execute_task(task: SweepTask, on_start: Began) -> Result:
    """Returns how a task ended; whatever is raised is an ending like others."""
    try:
        with signals.raise_on_signals("before the job began"):
            on_start(task)
            return execute(task.job_spec, task.folder)
    except Exception as error:
        return failed_result(task, error)


def failed_result(task: SweepTask, error: Exception) -> Result:
    """Returns the result of a task that ended by an exception, without a status of its own."""
    outcome = outcome_of_exception(error, None)
    return Result(outcome.status, outcome.reason, outcome.exit_code, task.folder, {})
