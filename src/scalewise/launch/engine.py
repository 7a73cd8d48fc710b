"""Where the jobs of a sweep run: an engine takes tasks and tells how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scalewise.launch import processes, signals
from scalewise.launch.classify import classify
from scalewise.launch.job import Order, Result, execute, isolated

INTERRUPTED = range(129, 160)
"""Exit codes of jobs that a signal to the whole sweep has ended."""


@dataclass(frozen=True)
class Task:
    """One job of a sweep: its number, what it runs, and the folder that it is to have."""

    number: int
    order: Order
    folder: Path


Began = Callable[[Task], None]


class Engine(Protocol):
    """What runs the jobs of a sweep."""

    def results(self, tasks: Sequence[Task], began: Began) -> Iterator[tuple[Task, Result]]:
        """Yields each task with how it ended, as they end; calls ``began`` as each starts.

        No job stops another. After a signal to the sweep the task that it ended is yielded, and
        what had not begun is left out.
        """


def imports(tasks: Sequence[Task]) -> list[str]:
    """Returns the modules that the ranks of some job import: its fork server may, once."""
    return sorted({name for task in tasks for name in task.order.run.imports})


class InTurn:
    """One job after the other, each in processes of its own."""

    def results(self, tasks: Sequence[Task], began: Began) -> Iterator[tuple[Task, Result]]:
        """Yields each task with how it ended."""
        if any(isolated(task.order) for task in tasks):
            processes.start_nursery(imports(tasks))
        for task in tasks:
            result = executed(task, began)
            yield task, result
            if result.exit_code in INTERRUPTED:
                return


def executed(task: Task, began: Began) -> Result:
    """Returns how a task ended; whatever is raised is an ending like others."""
    try:
        with signals.raised("before the job began"):
            began(task)
            return execute(task.order, task.folder)
    except Exception as error:
        return failed(task, error)


def failed(task: Task, error: Exception) -> Result:
    """Returns the result of a task that ended by an exception, without a status of its own."""
    ending = classify(error, None)
    return Result(ending.status, ending.reason, ending.exit_code, task.folder, {})
