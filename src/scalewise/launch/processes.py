"""Processes of a job, found and ended: nothing that a job started outlives it."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from scalewise.launch import signals
from scalewise.units import GIB, KIB

PRELOADED = "scalewise.launch.forkserver_preload"
PR_SET_CHILD_SUBREAPER = 36
SAFE_PATH = "PYTHONSAFEPATH"


def start_forkserver(imports: Iterable[str] = ()) -> None:
    """Starts the fork server from which jobs are born with torch and Lightning imported.

    ``imports`` are further modules. Returns while it still imports. One per process; later calls
    cost nothing, and change nothing.
    """
    # Before torch is imported there: threads that spin for each other cost 10x on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    multiprocessing.set_forkserver_preload([PRELOADED, *imports])
    with signals.ignore_signals(), _use_safe_path():  # as the server shall: Ctrl-C reaches it too
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _use_safe_path() -> Iterator[None]:
    """Starts processes whose ``-c`` does not put the current folder on their import path."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def reset_start_method() -> None:
    """Lets this process start others as any program does, however it was started itself."""
    usual, *_ = multiprocessing.get_all_start_methods()
    multiprocessing.set_start_method(usual, force=True)


@cache
def await_forkserver() -> None:
    """Waits until the fork server has imported all, so that no job's time goes into it: once."""
    newborn = multiprocessing.get_context("forkserver").Process(target=int)
    newborn.start()
    newborn.join()


def become_subreaper() -> None:
    """Makes this process the parent of grandchildren whose parent dies (Linux), to find them."""
    # Python's fork server reports every child that it did not fork, and the adopted are such.
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


def limit_memory(gib: float | None) -> None:
    """Limits what this process may still allocate, beyond what it has by now."""
    if gib is None:
        return
    import resource

    limit = _data_bytes() + int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """Returns what ``RLIMIT_DATA`` counts of this process: its private writable memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) * KIB


def descendants() -> list[psutil.Process]:
    """Returns every process that was started from this one's fork server."""
    servers = [child for child in psutil.Process().children() if _is_forkserver(child)]
    found: list[psutil.Process] = []
    for server in servers:
        try:
            found += server.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def processes_with_variable(name: str, value: str) -> list[psutil.Process]:
    """Returns every process that was started with this variable in its environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def rank_processes() -> list[psutil.Process]:
    """Returns those of the descendants that are ranks: born from the fork server, as it looks."""
    return [process for process in descendants() if _is_forkserver(process)]


def terminate(processes: Iterable[psutil.Process], grace: float) -> None:
    """Asks processes to end by SIGTERM and, after ``grace`` seconds, ends them by SIGKILL."""
    alive = list(processes)
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        for process in alive:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        alive = _still_alive(alive, wait)
        if not alive:
            return


def _still_alive(processes: list[psutil.Process], wait: float) -> list[psutil.Process]:
    deadline = time.monotonic() + wait
    while processes and time.monotonic() < deadline:
        processes = [process for process in processes if _is_running(process)]
        if processes:
            time.sleep(0.05)
    return processes


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_forkserver(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.forkserver" in part for part in process.cmdline())
    except psutil.Error:
        return False


def out_of_memory_kills() -> int:
    """Returns how often the kernel has killed for memory since it started (Linux), or 0."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))
