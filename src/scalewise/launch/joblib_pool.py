"""Executor that runs jobs in the process pool of joblib: ``hydra/launcher=joblib``.

For compatibility with ``hydra.launcher.n_jobs``. joblib assigns no devices or memory: every job
uses all of them, and a killed worker ends all jobs. ``hydra/launcher=packed`` assigns resources
and continues after a failure.
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
    """Runs ``n_jobs`` jobs concurrently; ``-1``: one per core."""

    def __init__(self, n_jobs: int = -1) -> None:
        if not isinstance(n_jobs, int) or n_jobs == 0:
            reason = "must be the number of concurrent jobs, or -1 for one per core"
            raise ConfigError.for_key("hydra.launcher.n_jobs", n_jobs, reason)
        self._n_jobs = n_jobs
        self._stop_signal = 0

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        """Run the jobs and yield each task with its result as it ends."""
        if not tasks:
            return
        from joblib import Parallel, delayed, effective_n_jobs
        from joblib.externals.loky import get_reusable_executor
        from joblib.externals.loky.process_executor import BrokenProcessPool

        remaining_tasks = {task.number: task for task in tasks}
        started_tasks: deque[SweepTask] = deque()  # filled by joblib's thread

        def calls() -> Iterator[Any]:
            for task in tasks:
                if self._stop_signal:
                    return
                started_tasks.append(task)
                yield delayed(_run_task)(task)

        workers = min(len(tasks), effective_n_jobs(self._n_jobs))
        pool = Parallel(
            n_jobs=workers,
            backend="loky",
            batch_size=1,
            pre_dispatch="n_jobs",  # dispatch a job only when a worker is free
            return_as="generator_unordered",
        )
        is_reported = False
        with signals.forward_signals(self._stop):
            try:
                results = pool(calls())
                _report_started(started_tasks, on_start)
                for number, result in results:
                    _report_started(started_tasks, on_start)
                    is_reported |= result.exit_code in INTERRUPTED
                    yield remaining_tasks.pop(number), result
            except BrokenProcessPool:
                if not self._stop_signal:
                    for task in remaining_tasks.values():
                        reason = "a joblib worker died, which ended all jobs"
                        yield task, Result("failed", reason, 1, task.folder, {})
                    return
            finally:
                get_reusable_executor(max_workers=workers).shutdown(wait=True, kill_workers=True)
        if remaining_tasks and not is_reported:
            task = next(iter(remaining_tasks.values()))
            reason = f"{signal.Signals(self._stop_signal).name} before the job began"
            yield task, Result("interrupted", reason, 128 + self._stop_signal, task.folder, {})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the running jobs, and start no more jobs."""
        self._stop_signal = self._stop_signal or number
        for child in psutil.Process().children():
            if _is_worker(child):
                child.send_signal(number)


def _report_started(started_tasks: deque[SweepTask], on_start: StartCallback) -> None:
    while started_tasks:
        on_start(started_tasks.popleft())


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("loky.backend.popen_loky" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _run_task(task: SweepTask) -> tuple[int, Result]:
    """Run a task in a worker process of joblib; returns its number and result."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # Ctrl-C reaches jobs through the sweep only
        for number in signals.SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # while no job runs
        # Ranks inherit the start method of this process and cannot use loky.
        processes.reset_start_method()
    with console.shield_streams():
        return task.number, execute_task(task, lambda _: None)
