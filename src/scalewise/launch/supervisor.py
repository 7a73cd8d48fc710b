"""Supervisor processes of a packed sweep, each with one job at a time, and their pool.

Ending a job ends all descendants of its process, so that concurrent jobs need a supervisor each.
A supervisor restarts no job: ``job`` does.
``python -m scalewise.launch.supervisor FD PARENT`` reads tasks from a pipe of the sweep, the
process PARENT, and ends with it.
"""

from __future__ import annotations

import ctypes
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

from scalewise import console
from scalewise.hardware import this_machine
from scalewise.launch import exit_reports, processes
from scalewise.launch.executor import SweepTask, execute_task, failed_result
from scalewise.launch.job import Result, attempt_folders
from scalewise.launch.outcomes import Outcome
from scalewise.launch.processes import ResourceAffinity
from scalewise.run_files import read_json, write_json

_SUPERVISOR_COMMAND = (sys.executable, "-P", "-m", "scalewise.launch.supervisor")
MARK = "SCALEWISE_SUPERVISOR"
"""Environment variable that identifies the descendants of a supervisor after it has died."""
ORPHAN_GRACE = 10.0
"""Time for the ranks of a killed supervisor to save checkpoints, in seconds."""
IDLE_GRACE = 10.0
"""Time for an idle supervisor to exit, in seconds."""


@dataclass(eq=False)
class _SupervisorProcess:
    process: subprocess.Popen[str]
    connection: Connection
    marker: str
    task: SweepTask | None = None
    """Running job; None: idle."""
    job_number: int = 0
    """Number of the job whose output is printed, the running one or the last."""
    is_ready: bool = False
    """Whether imports are complete and signals are handled."""
    is_signalled: bool = False


class SupervisorPool:
    """Starts jobs, returns their results and forwards signals; leaves no process behind."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        """``imports``: additional modules that the forkservers import."""
        self._imports = imports
        self.stop_signal = 0
        """First received signal; 0: none."""
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
        """Whether a job is running."""
        return any(supervisor.task for supervisor in self._supervisors)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to every running job, and start no more jobs."""
        self.stop_signal = self.stop_signal or number
        for supervisor in self._supervisors:
            if supervisor.task is not None:
                self._send_signal(number, supervisor)

    def _send_signal(self, number: int, supervisor: _SupervisorProcess) -> None:
        supervisor.is_signalled = True
        supervisor.process.send_signal(number if supervisor.is_ready else signal.SIGTERM)

    def start(self, task: SweepTask, affinity: ResourceAffinity) -> None:
        """Start a job in an idle supervisor, or in a new one."""
        idle_supervisors = (
            s for s in self._supervisors if s.task is None and s.process.poll() is None
        )
        supervisor = next(idle_supervisors, None) or self._start_supervisor()
        supervisor.task, supervisor.job_number = task, task.number
        with suppress(BrokenPipeError):  # it was just killed: ``wait_for_results`` reports it
            supervisor.connection.send((task, affinity))
        if self.stop_signal and not supervisor.is_signalled:  # a signal arrived during its start
            self._send_signal(self.stop_signal, supervisor)

    def wait_for_results(self) -> Iterator[tuple[SweepTask, Result]]:
        """Wait until a job ends, and yield the ended jobs with their results."""
        busy_supervisors = {s.connection: s for s in self._supervisors if s.task}
        for ready in wait(list(busy_supervisors)):
            supervisor = busy_supervisors[ready]  # type: ignore[index]  # wait returns elements of its argument
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
        connection, child_connection = Pipe()
        mark = uuid.uuid4().hex
        process = subprocess.Popen(  # noqa: S603 (fixed arguments)
            [
                *_SUPERVISOR_COMMAND,
                str(child_connection.fileno()),
                str(os.getpid()),
                *self._imports,
            ],
            pass_fds=[child_connection.fileno()],
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C reaches jobs through ``stop`` only
        )
        child_connection.close()
        supervisor = _SupervisorProcess(process, connection, mark)
        threading.Thread(target=_print_output, args=(supervisor,), daemon=True).start()
        self._supervisors.append(supervisor)
        return supervisor

    def _handle_death(self, supervisor: _SupervisorProcess, task: SweepTask) -> Result:
        """End the descendants of a dead supervisor, and return the result of its job."""
        process = supervisor.process
        supervisor.connection.close()
        code = process.wait()
        processes.terminate(
            processes.processes_with_variable(MARK, supervisor.marker), ORPHAN_GRACE
        )
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        outcome = Outcome("failed", f"the supervisor process died: {cause}")
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            outcome = Outcome(
                "interrupted", f"{name} ended the job immediately", signal_number=self.stop_signal
            )
        return _write_lost_result(task, process.pid, outcome)


def _write_lost_result(task: SweepTask, pid: int, outcome: Outcome) -> Result:
    """Write and return the result of a job whose supervisor died."""
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


def _print_output(supervisor: _SupervisorProcess) -> None:
    """Print the output of jobs, each line after the job number."""
    assert supervisor.process.stdout is not None
    with suppress(ValueError):  # the stream is closed
        for line in supervisor.process.stdout:
            console.print_output(f"{supervisor.job_number:>3} | {line.rstrip()}")


PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, *imports: str) -> None:
    """Run tasks from the pipe until it is closed."""
    with suppress(OSError, AttributeError):  # Linux: jobs save checkpoints when the sweep is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        return
    processes.start_forkserver(imports)
    connection = Connection(descriptor)
    with console.shield_streams(), suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        connection.send(None)  # ready
        while True:
            task, affinity = connection.recv()
            try:
                processes.set_affinity(affinity)
            except OSError as error:
                connection.send(failed_result(task, error))
                continue
            this_machine.cache_clear()  # the job records its own cores and devices
            connection.send(execute_task(task, lambda _: None))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
