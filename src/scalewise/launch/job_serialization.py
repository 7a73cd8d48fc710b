"""Serialization of job specs as JSON, so that processes on other machines unpickle no code."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from scalewise import registry
from scalewise.errors import ScalewiseError
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, write_json


def write_task(task: SweepTask, file: Path) -> None:
    """Write a task to a file for ``read_task``."""
    job_spec = task.job_spec
    content = {
        "run": job_spec.run.as_dict(),
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
