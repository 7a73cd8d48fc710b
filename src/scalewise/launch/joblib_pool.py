"""Several jobs of a sweep at once in joblib's processes: ``hydra/launcher=joblib``.

For those who come with ``hydra.launcher.n_jobs`` in their lines. joblib knows neither devices nor
memory: every job sees all of them, and a worker that is killed takes the jobs of all with it.
``hydra/launcher=packed`` shares them out and outlives its dead.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import psutil

from scalewise import console
from scalewise.errors import ConfigError
from scalewise.launch import processes, signals
from scalewise.launch.executor import INTERRUPTED, StartCallback, SweepTask, execute_task
from scalewise.launch.job import Result


class JoblibExecutor:
    """As many jobs at once as asked for; ``-1`` is one for each core."""

    def __init__(self, n_jobs: int = -1) -> None:
        if not isinstance(n_jobs, int) or n_jobs == 0:
            reason = "must be the jobs at once, or -1 for one a core"
            raise ConfigError.for_key("hydra.launcher.n_jobs", n_jobs, reason)
        self._n_jobs = n_jobs
        self._stop_signal = 0

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Yields each task with how it ended, as they end."""
        if not tasks:
            return
        from joblib import Parallel, delayed, effective_n_jobs
        from joblib.externals.loky import get_reusable_executor
        from joblib.externals.loky.process_executor import BrokenProcessPool

        left = {task.number: task for task in tasks}
        handed: deque[SweepTask] = deque()  # from joblib's thread to this one

        def calls() -> Iterator[Any]:
            for task in tasks:
                if self._stop_signal:
                    return
                handed.append(task)
                yield delayed(_run_job)(task)

        workers = min(len(tasks), effective_n_jobs(self._n_jobs))
        pool = Parallel(
            n_jobs=workers,
            backend="loky",
            batch_size=1,
            pre_dispatch="n_jobs",  # what is handed to a worker begins at once
            return_as="generator_unordered",
        )
        told = False
        with signals.forward_signals(self._stop):
            try:
                ends = pool(calls())
                _print_job_line(handed, on_start)
                for number, result in ends:
                    _print_job_line(handed, on_start)
                    told |= result.exit_code in INTERRUPTED
                    yield left.pop(number), result
            except BrokenProcessPool:
                if not self._stop_signal:
                    for task in left.values():
                        reason = "a worker of joblib's died, and all jobs with it"
                        yield task, Result("failed", reason, 1, task.folder, {})
                    return
            finally:
                get_reusable_executor(max_workers=workers).shutdown(wait=True, kill_workers=True)
        if left and not told:
            task = next(iter(left.values()))
            reason = f"{signal.Signals(self._stop_signal).name} before the job began"
            yield task, Result("interrupted", reason, 128 + self._stop_signal, task.folder, {})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to the jobs under way; none starts after it."""
        self._stop_signal = self._stop_signal or number
        for child in psutil.Process().children():
            if _is_worker(child):
                child.send_signal(number)


def _print_job_line(dispatched: deque[SweepTask], on_start: StartCallback) -> None:
    while dispatched:
        on_start(dispatched.popleft())


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("loky.backend.popen_loky" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _run_job(task: SweepTask) -> tuple[int, Result]:
    """Returns a job's number and how it ended; in a process of joblib's."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # a terminal's Ctrl-C comes once, by way of the sweep
        for number in signals.NUMBERS:
            signal.signal(number, signal.SIG_IGN)  # between two jobs
        # Ranks are told how this process would start others, and know nothing of loky.
        processes.reset_start_method()
    with console.shield_streams():
        return task.number, execute_task(task, lambda _: None)
