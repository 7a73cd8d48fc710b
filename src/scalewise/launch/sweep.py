"""The jobs of a sweep, and the record of them that is true at any moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalewise.launch.engine import INTERRUPTED, Engine, Task
from scalewise.launch.job import Result
from scalewise.tracking.files import read_json, write_json


def execute_all(
    tasks: Sequence[Task],
    folder: Path,
    engine: Engine,
    *,
    command: str,
    question: str,
    announce: Callable[[Task, int], None],
    report: Callable[[Task, Result], None],
) -> list[Result]:
    """Runs jobs into their folders and returns how each ended; none stops the others.

    Keeps ``sweep.json`` in ``folder`` true at any moment. A signal ends the sweep: what had not
    begun is noted as ``interrupted``.
    """
    earlier = read_json(folder / "sweep.json")
    record: dict[str, Any] = earlier or {
        "name": folder.parent.name,
        "question": question,
        "command": command,
        "verb": "train",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ended": None,
        "reference": None,
        "jobs": [],
    }
    jobs = {task.number: _planned(task, folder) for task in tasks}
    record["jobs"] += jobs.values()
    record["varying"] = _varying([job["varied"] for job in record["jobs"]])

    def began(task: Task) -> None:
        jobs[task.number]["status"] = "running"
        write_json(folder / "sweep.json", record)
        announce(task, len(tasks))

    results: dict[int, Result] = {}
    for task, result in engine.results(tasks, began):
        results[task.number] = result
        jobs[task.number]["folder"] = str(result.folder.relative_to(folder))
        jobs[task.number]["status"] = result.status
        write_json(folder / "sweep.json", record)
        report(task, result)
    stopped = next((r for r in results.values() if r.exit_code in INTERRUPTED), None)
    for task in tasks:
        if task.number not in results:
            assert stopped is not None, f"job {task.number} has no result"
            jobs[task.number]["status"] = "interrupted"
            results[task.number] = Result(
                "interrupted", stopped.reason, stopped.exit_code, task.folder, {}
            )
    record["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / "sweep.json", record)
    return [results[task.number] for task in tasks]


def _planned(task: Task, folder: Path) -> dict[str, Any]:
    return {
        "number": task.number,
        "folder": str(task.folder.relative_to(folder)),
        "overrides": list(task.order.run.overrides),
        "varied": dict(task.order.varied),
        "status": "waiting",
    }


def _varying(varied: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for values in varied for key in values)
    return {
        key: list(dict.fromkeys(values[key] for values in varied if key in values)) for key in keys
    }
