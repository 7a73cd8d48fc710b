"""Executors of sweeps: interface, the sequential executor, and all executors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from scalewise.errors import ConfigError
from scalewise.launch import processes, signals
from scalewise.launch.job import JobSpec, Result, execute, needs_own_process
from scalewise.launch.outcomes import outcome_of_exception

INTERRUPTED = range(129, 160)
"""Exit codes of jobs that a signal ended: 128 + signal number."""


@dataclass(frozen=True)
class SweepTask:
    """Job of a sweep with its number and folder."""

    number: int
    """Number of the job in its sweep."""
    job_spec: JobSpec
    """Job to run."""
    folder: Path
    """Planned folder of the run."""


StartCallback = Callable[[SweepTask], None]


class Executor(Protocol):
    """Runs the jobs of a sweep."""

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Run the jobs and yield each task with its result as it ends.

        Calls ``on_start`` when a job starts. A failed job does not stop the others. After a signal,
        yields the interrupted task and omits the jobs that have not started.
        """


def preload_modules(tasks: Sequence[SweepTask]) -> list[str]:
    """Modules that ranks of the jobs import, for the forkserver to import once."""
    return sorted({name for task in tasks for name in task.job_spec.run.imports})


class SequentialExecutor:
    """Runs one job after the other, each in its own processes."""

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Run the jobs in order and yield each task with its result."""
        if any(needs_own_process(task.job_spec) for task in tasks):
            processes.start_forkserver(preload_modules(tasks))
        for task in tasks:
            result = execute_task(task, on_start)
            yield task, result
            if result.exit_code in INTERRUPTED:
                return


def execute_task(task: SweepTask, on_start: StartCallback) -> Result:
    """Run a task and return its result; an exception becomes a failed result."""
    try:
        with signals.raise_on_signals("before the job began"):
            on_start(task)
            return execute(task.job_spec, task.folder)
    except Exception as error:
        return failed_result(task, error)


def failed_result(task: SweepTask, error: Exception) -> Result:
    """Result of a task that an exception ended before it wrote a status."""
    outcome = outcome_of_exception(error, None)
    return Result(outcome.status, outcome.reason, outcome.exit_code, task.folder, {})


EXECUTORS: Mapping[str, str] = {
    "in_turn": "scalewise.launch.executor:SequentialExecutor",
    "packed": "scalewise.launch.packed_executor:PackedExecutor",
    "slurm": "scalewise.launch.slurm:SlurmExecutor",
}
"""Import path of the executor by the ``engine`` option; only the chosen one is imported."""

REMOTE_LAUNCHERS = ("slurm",)
"""Executors that run jobs on other machines."""


def build_executor(options: Mapping[str, Any]) -> Executor:
    """Executor for the options of ``hydra/launcher``."""
    arguments = dict(options)
    engine = str(arguments.pop("engine"))
    if engine == "slurm" and find_spec("submitit") is None:
        reason, fix = "requires hydra-submitit-launcher", "pip install 'scalewise[slurm]'"
        raise ConfigError.for_key("hydra/launcher", engine, reason, fix)
    executor: Executor = resolve_name(EXECUTORS[engine])(**arguments)
    return executor
