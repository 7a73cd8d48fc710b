"""Orders as JSON, for processes that are born on another machine: no code is loaded with them."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from scalewise.config import registry
from scalewise.errors import ScalewiseError
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json, write_json


def write_task(task: SweepTask, file: Path) -> None:
    """Writes a task, so that ``read`` returns an equal one."""
    order = task.job_spec
    content = {
        "run": order.run.as_dict(),
        "command": order.command,
        "verb": order.verb,
        "varied": dict(order.varied),
        "changed": list(order.changed),
        "sweep": order.sweep,
        "folder": str(task.folder),
        "number": task.number,
    }
    write_json(file, content)


def read_task(file: Path) -> SweepTask:
    """Returns the task that a file holds; raises ``ScalewiseError`` where it holds none."""
    content: Any = read_json(file)
    if not content:
        raise ScalewiseError(f"{file} holds no order of a job, or cannot be seen from this machine")
    order = JobSpec(
        restore_run(content["run"]),
        command=content["command"],
        verb=content["verb"],
        varied=content["varied"],
        changed=content["changed"],
        sweep=content["sweep"],
    )
    return SweepTask(int(content["number"]), order, Path(content["folder"]))


def restore_run(values: Mapping[str, Any]) -> RunConfig:
    """Returns the Run of which ``as_dict`` gave these values; its specs are registered ones."""
    registry.import_options()
    known = registry.registered_targets()
    hints = typing.get_type_hints(RunConfig)
    parts: dict[str, Any] = {}
    for part in fields(RunConfig):
        value = values[part.name]
        if isinstance(value, Mapping) and "_target_" in value:
            cls = known[value["_target_"]]
            declared = typing.get_type_hints(cls)
            value = cls(
                **{
                    f.name: _convert_to_declared(declared[f.name], value[f.name])
                    for f in fields(cls)
                }
            )
        else:
            value = _convert_to_declared(hints[part.name], value)
        parts[part.name] = value
    return RunConfig(**parts)


def _convert_to_declared(declared_type: Any, value: Any) -> Any:
    """Returns a plain value as its field declares it: an enum by its name, a list as a tuple."""
    if isinstance(value, str):
        for kind in (declared_type, *typing.get_args(declared_type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
                return kind[value]
    return tuple(value) if isinstance(value, list) else value
