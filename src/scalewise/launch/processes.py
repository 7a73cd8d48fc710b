"""Processes of a job: forkserver, descendants, termination, memory limit, cores and devices."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from scalewise.launch import signals
from scalewise.torch_environment import set_torch_variables
from scalewise.units import GIB, KIB

PRELOAD_MODULE = "scalewise.launch.forkserver_preload"
PR_SET_CHILD_SUBREAPER = 36
M_MMAP_THRESHOLD = -3
SAFE_PATH = "PYTHONSAFEPATH"


def start_forkserver(imports: Iterable[str] = ()) -> None:
    """Start the forkserver, which imports torch and Lightning once for all jobs.

    ``imports``: additional modules. Returns before the imports are complete. Later calls in this
    process have no effect.
    """
    set_torch_variables(os.environ)
    # Last, as it freezes the objects of all imported modules.
    multiprocessing.set_forkserver_preload([*imports, PRELOAD_MODULE])
    # The forkserver inherits the ignored signals, as Ctrl-C reaches it too.
    with signals.ignore_signals(), _use_safe_path():
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _use_safe_path() -> Iterator[None]:
    """Start processes inside the block without the current folder on their import path."""
    previous_value = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = previous_value


def reset_start_method() -> None:
    """Set the default start method of multiprocessing, whatever started this process."""
    default_method, *_ = multiprocessing.get_all_start_methods()
    multiprocessing.set_start_method(default_method, force=True)


@cache
def await_forkserver() -> None:
    """Wait, once, for the imports of the forkserver, so that they do not count as job time."""
    worker = multiprocessing.get_context("forkserver").Process(target=int)
    worker.start()
    worker.join()


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process (Linux), so that they can be found."""
    # Python's forkserver warns about children that it did not fork, as adopted ones.
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


def limit_memory(gib: float | None) -> None:
    """Limit the memory that this process can allocate in addition to its current memory.

    glibc keeps freed blocks of up to 32 MiB, which would count; here it returns those of 128 KiB or
    more to the system.
    """
    if gib is None:
        return
    import resource

    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * KIB)

    limit = _data_bytes() + int(gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """Memory of this process that ``RLIMIT_DATA`` limits, in bytes: private writable memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) * KIB


def descendants() -> list[psutil.Process]:
    """Descendants of the forkserver of this process."""
    servers = [child for child in psutil.Process().children() if _is_forkserver(child)]
    children: list[psutil.Process] = []
    for server in servers:
        try:
            children += server.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return children


def processes_with_variable(name: str, value: str) -> list[psutil.Process]:
    """Processes with an environment variable of this value, except for this process."""
    matches: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.pid != os.getpid():
                matches.append(process)
        except psutil.Error:
            continue
    return matches


def rank_processes() -> list[psutil.Process]:
    """Descendants that the forkserver forked directly: the ranks."""
    return [process for process in descendants() if _is_forkserver(process)]


def terminate(processes: Iterable[psutil.Process], grace: float) -> None:
    """Send SIGTERM to processes, and SIGKILL after ``grace`` seconds."""
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
        return any("multiprocessing.forkserver" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def out_of_memory_kills() -> int:
    """Number of out-of-memory kills of the kernel since boot (Linux), or 0."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ResourceAffinity:
    """CPU cores and CUDA devices of a process."""

    cores: frozenset[int]
    """Numbers of the CPU cores."""
    gpus: str | None
    """``CUDA_VISIBLE_DEVICES``; None: unchanged."""


def current_affinity() -> ResourceAffinity:
    """Affinity of this process."""
    return ResourceAffinity(frozenset(os.sched_getaffinity(0)), os.environ.get(VISIBLE_DEVICES))


def set_affinity(affinity: ResourceAffinity) -> None:
    """Set the affinity of this process; call before CUDA is initialized."""
    if affinity.gpus is not None:
        os.environ[VISIBLE_DEVICES] = affinity.gpus
    if affinity.cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, affinity.cores)


def set_affinity_and_threads(affinity: ResourceAffinity) -> None:
    """Set the affinity and limit the threads of torch to the number of cores."""
    import torch

    set_affinity(affinity)
    if len(affinity.cores) < torch.get_num_threads():
        torch.set_num_threads(len(affinity.cores))
