"""Supervisor process of a packed sweep, which runs one job at a time.

Ending a job ends all descendants of its process, so that concurrent jobs need a supervisor each.
``python -m scalewise.launch.supervisor FD PARENT`` reads tasks from a pipe of the sweep, the
process PARENT, and ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from scalewise import console
from scalewise.hardware import this_machine
from scalewise.launch import processes, resource_affinity
from scalewise.launch.executor import execute_task, failed_result

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
                resource_affinity.set_affinity(affinity)
            except OSError as error:
                connection.send(failed_result(task, error))
                continue
            this_machine.cache_clear()  # the job records its own cores and devices
            connection.send(execute_task(task, lambda _: None))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
