"""Executors of sweeps: their interface, tasks as JSON, and the sequential executor."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from scalewise import registry
from scalewise.errors import ConfigError, ScalewiseError
from scalewise.launch import processes, signals
from scalewise.launch.job import JobSpec, Result, execute, needs_own_process
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_json

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


def build_executor(options: Mapping[str, Any]) -> Executor:
    """Executor for the options of ``hydra/launcher``."""
    arguments = dict(options)
    engine = str(arguments.pop("engine"))
    if engine == "slurm" and find_spec("submitit") is None:
        reason, fix = "requires hydra-submitit-launcher", "pip install 'scalewise[slurm]'"
        raise ConfigError.for_key("hydra/launcher", engine, reason, fix)
    executor: Executor = resolve_name(EXECUTORS[engine])(**arguments)
    return executor


def write_task(task: SweepTask, file: Path) -> None:
    """Write a task to a file for ``read_task``."""
    job_spec = task.job_spec
    content = {
        "run": job_spec.run.as_dict(resolve_compile=False),
        "command": job_spec.command,
        "varied": dict(job_spec.varied),
        "changed": list(job_spec.changed),
        "sweep": job_spec.sweep,
        "folder": str(task.folder),
        "number": task.number,
    }
    write_json(file, content)


def read_task(file: Path) -> SweepTask:
    """Read a task from a file. Raises ``ScalewiseError`` if the file contains none."""
    content: Any = read_json(file)
    if not content:
        raise ScalewiseError(f"{file} contains no job spec, or is not visible from this machine")
    job_spec = JobSpec(
        restore_run(content["run"]),
        command=content["command"],
        varied=content["varied"],
        changed=content["changed"],
        sweep=content["sweep"],
    )
    return SweepTask(int(content["number"]), job_spec, Path(content["folder"]))


def restore_run(values: Mapping[str, Any]) -> RunConfig:
    """``RunConfig`` from the values of ``as_dict``, with registered option classes only."""
    registry.import_options()
    targets = registry.registered_targets()
    hints = typing.get_type_hints(RunConfig)
    values_by_field: dict[str, Any] = {}
    for config_field in fields(RunConfig):
        value = values[config_field.name]
        if isinstance(value, Mapping) and "_target_" in value:
            cls = targets[value["_target_"]]
            declared_types = typing.get_type_hints(cls)
            value = cls(
                **{
                    f.name: _convert_to_declared(declared_types[f.name], value[f.name])
                    for f in fields(cls)
                }
            )
        else:
            value = _convert_to_declared(hints[config_field.name], value)
        values_by_field[config_field.name] = value
    return RunConfig(**values_by_field)


def _convert_to_declared(declared_type: Any, value: Any) -> Any:
    """Value converted to its declared type: an enum from its name, a tuple from a list."""
    if isinstance(value, str):
        for kind in (declared_type, *typing.get_args(declared_type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
                return kind[value]
    return tuple(value) if isinstance(value, list) else value
