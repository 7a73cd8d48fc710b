"""The supervisors of a packed sweep: warm processes, each with one job at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Self

from scalewise.launch import exit_reports, processes
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import Result, attempt_folders
from scalewise.launch.resource_affinity import ResourceAffinity
from scalewise.launch.status import Outcome
from scalewise.tracking.run_files import read_json, write_json

_START = (sys.executable, "-P", "-m", "scalewise.launch.supervisor")
MARK = "SCALEWISE_SUPERVISOR"
"""Environment variable by which all that a supervisor has started is found when it is gone."""
ORPHAN_GRACE = 10.0
"""Seconds in which the ranks of a supervisor that was killed may save themselves."""
IDLE_GRACE = 2.0


@dataclass(eq=False)
class _SupervisorProcess:
    process: subprocess.Popen[str]
    connection: Connection
    marker: str
    task: SweepTask | None = None
    """The job under way."""
    job_number: int = 0
    """The job whose lines come: the last of them when it has ended."""
    is_ready: bool = False
    """Whether it has imported what it needs, and handles signals."""
    signalled: bool = False


class SupervisorPool:
    """Starts jobs, tells how they ended, and passes signals on; leaves no process behind."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        """``imports``: what the fork servers of its supervisors import besides."""
        self._imports = imports
        self.stop_signal = 0
        """The first signal that came."""
        self._supervisors: list[_SupervisorProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for supervisor in self._supervisors:
            supervisor.connection.close()
        for supervisor in self._supervisors:
            with suppress(subprocess.TimeoutExpired):
                supervisor.process.wait(IDLE_GRACE)
            processes.terminate(
                processes.processes_with_variable(MARK, supervisor.marker), IDLE_GRACE
            )
            supervisor.process.wait()

    @property
    def is_busy(self) -> bool:
        """Returns whether some job is under way."""
        return any(supervisor.task for supervisor in self._supervisors)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to every job under way; none starts after it."""
        self.stop_signal = self.stop_signal or number
        for supervisor in self._supervisors:
            if supervisor.task is not None:
                self._send_signal(number, supervisor)

    def _send_signal(self, number: int, supervisor: _SupervisorProcess) -> None:
        supervisor.signalled = True
        supervisor.process.send_signal(number if supervisor.is_ready else signal.SIGTERM)

    def start(self, task: SweepTask, affinity: ResourceAffinity) -> None:
        """Starts a job in an idle supervisor, a new one where there is none."""
        idle = (one for one in self._supervisors if one.task is None and one.process.poll() is None)
        supervisor = next(idle, None) or self._start_supervisor()
        supervisor.task, supervisor.job_number = task, task.number
        with suppress(BrokenPipeError):  # it was killed just now: ``wait_for_results`` tells
            supervisor.connection.send((task, affinity))
        if self.stop_signal and not supervisor.signalled:  # a signal came while it was hired
            self._send_signal(self.stop_signal, supervisor)

    def wait_for_results(self) -> Iterator[tuple[SweepTask, Result]]:
        """Waits until a job ends, and yields those that have."""
        working = {one.connection: one for one in self._supervisors if one.task}
        for ready in wait(list(working)):
            supervisor = working[ready]  # type: ignore[index]  # it is one of those waited for
            task = supervisor.task
            assert task is not None
            try:
                result = supervisor.connection.recv()
            except (EOFError, ConnectionResetError):
                self._supervisors.remove(supervisor)
                result = self._handle_death(supervisor, task)
            if result is None:
                supervisor.is_ready = True
                continue
            supervisor.task = None
            yield task, result

    def _start_supervisor(self) -> _SupervisorProcess:
        ours, theirs = Pipe()
        mark = uuid.uuid4().hex
        process = subprocess.Popen(  # noqa: S603 (a list of our own words)
            [*_START, str(theirs.fileno()), str(os.getpid()), *self._imports],
            pass_fds=[theirs.fileno()],
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # a terminal's Ctrl-C comes once, by way of ``stop``
        )
        theirs.close()
        supervisor = _SupervisorProcess(process, ours, mark)
        threading.Thread(target=_print_job_line, args=(supervisor,), daemon=True).start()
        self._supervisors.append(supervisor)
        return supervisor

    def _handle_death(self, supervisor: _SupervisorProcess, task: SweepTask) -> Result:
        """Ends what a supervisor has left, and returns the result of its job."""
        process = supervisor.process
        supervisor.connection.close()
        code = process.wait()
        processes.terminate(
            processes.processes_with_variable(MARK, supervisor.marker), ORPHAN_GRACE
        )
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        outcome = Outcome("failed", f"its supervising process died: {cause}")
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            outcome = Outcome(
                "interrupted", f"{name} ended it at once", signal_number=self.stop_signal
            )
        return _write_lost_result(task, process.pid, outcome)


def _write_lost_result(task: SweepTask, pid: int, outcome: Outcome) -> Result:
    """Returns the result of a job that nobody is left to write down, and writes it down."""
    for folder in attempt_folders(task.folder):
        content = read_json(folder / "status.json")
        if content.get("process") != pid:
            continue
        if content["status"] == "running":
            end = {"ended": datetime.now(UTC).isoformat(timespec="milliseconds")}
            end |= {key: getattr(outcome, key) for key in ("status", "reason", "exit_code")}
            content |= end
            write_json(folder / "status.json", content)
            exit_reports.remove_reports(folder)
        status, reason = str(content["status"]), str(content["reason"])
        code = int(str(content["exit_code"]))
        return Result(status, reason, code, folder, read_json(folder / "summary.json"))
    return Result(outcome.status, outcome.reason, outcome.exit_code, task.folder, {})


def _print_job_line(supervisor: _SupervisorProcess) -> None:
    """Prints what the job says, each line under its number."""
    assert supervisor.process.stdout is not None
    with suppress(ValueError):  # closed
        for line in supervisor.process.stdout:
            sys.stdout.write(f"{supervisor.job_number:>3} | {line.rstrip()}\n")
            sys.stdout.flush()
