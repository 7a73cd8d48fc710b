"""A process that runs one job after the other for a sweep that runs several at once.

What ends a job's processes ends all that were started from this process, so that each of the jobs
under way needs one of its own. ``python -m scalewise.launch.supervisor FD PARENT`` reads orders
from a pipe that its sweep, the process PARENT, holds, and ends with it.
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
    """Runs the jobs that come, until the pipe is closed."""
    with suppress(OSError, AttributeError):  # Linux: jobs are saved when the sweep is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it was, before this process could ask to be told
        return
    processes.start_forkserver(imports)
    orders = Connection(descriptor)
    with console.shield_streams(), suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        orders.send(None)  # ready
        while True:
            task, own = orders.recv()
            try:
                resource_affinity.set_affinity(own)
            except OSError as error:
                orders.send(failed_result(task, error))
                continue
            this_machine.cache_clear()  # a job tells of the share that it has
            orders.send(execute_task(task, lambda _: None))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
