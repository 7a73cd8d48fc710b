"""Ranks as separate processes under torch elastic."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scalewise import console
from scalewise.compat import torch_distributed
from scalewise.launch import exit_reports, flight_recorder, processes, rendezvous, signals
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.launch.processes import (
    ResourceAffinity,
    current_affinity,
    reset_start_method,
    set_affinity_and_threads,
)
from scalewise.launch.rank_mode import ElasticRanks, InProcess, run_ranks
from scalewise.launch_config import Launch
from scalewise.run_config import RunConfig

ELASTIC = "torch.distributed.elastic"
logger = logging.getLogger(__name__)

PEER_GRACE = 5.0
"""Time for the other ranks to write their exit reports after one has failed, in seconds; a rank
that waits in a collective of a device ignores SIGTERM."""
TIMEOUT_GRACE = 5.0
"""Time from SIGTERM to SIGKILL after a timeout, in seconds; a hung process ignores SIGTERM."""


@run_ranks.register(ElasticRanks)
def _run_elastic_ranks(
    mode: ElasticRanks,
    run: RunConfig,
    folder: Path,
    resume: Path | None,
    tracking_metadata: dict[str, object] | None,
) -> Outcome:
    """Run one attempt at a job in its ranks and return the outcome; no process outlives it."""
    return run_entry(
        run.world_size, train_as_rank, (run, folder, resume, tracking_metadata), folder, run.launch
    )


def run_entry(
    ranks: int,
    entry: Callable[..., None],
    arguments: tuple[object, ...],
    folder: Path,
    launch: Launch,
) -> Outcome:
    """Run ``entry(*arguments)`` in ``ranks`` processes and return the outcome.

    The ranks write their exit reports to ``folder``.
    """
    processes.start_forkserver()
    processes.await_forkserver()
    exit_reports.prepare_reports(folder)
    kills_before = processes.out_of_memory_kills()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=rendezvous.NAME,
        rdzv_endpoint=rendezvous.ADDRESS,
        local_addr=rendezvous.ADDRESS,
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        # The default log folder is a temporary one that each job leaves behind.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # _SignalForwarder handles the others
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.11 always waits 30 s
        config.shutdown_timeout = max(1, round(launch.grace))
    watchdog = Watchdog(launch.timeout, folder)
    peers = torch_distributed.on_rank_failure(partial(_kill_later, folder))
    try:
        with signals.forward_signals(_SignalForwarder()), _silence_elastic_log(), watchdog, peers:
            elastic_launch(config, run_with_affinity)(current_affinity(), entry, *arguments)
        outcome = next(
            (o for o in exit_reports.read_reports(folder) if o.status == "pruned"), Outcome("ok")
        )
    except SignalException as error:
        outcome = _signal_outcome(error.sigval, folder)
    except ChildFailedError as error:
        outcome = _failure_outcome(error, folder, processes.out_of_memory_kills() > kills_before)
    finally:
        with signals.ignore_signals():
            processes.terminate(processes.descendants(), grace=1.0)
            console.show_cursor()
    return watchdog.apply_timeout(outcome)


class _SignalForwarder:
    """Signal handler that forwards the first signal to the ranks; a second SIGINT kills them."""

    def __init__(self) -> None:
        self._forwarded = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._forwarded:
            self._forwarded = True
            raise SignalException("a signal to the launcher", signal.Signals(number))
        if number == signal.SIGINT:
            processes.terminate(processes.descendants(), grace=0.0)


def _kill_later(folder: Path, pids: Mapping[int, int]) -> None:
    """Kill ranks that have no exit report after ``PEER_GRACE`` seconds.

    The others have ended, or finish their W&B session.

    Args:
        folder: Run folder.
        pids: Process IDs by rank.
    """
    ranks: dict[int, psutil.Process] = {}
    for rank, pid in pids.items():
        with suppress(psutil.NoSuchProcess):
            ranks[rank] = psutil.Process(pid)

    def kill() -> None:
        reported_ranks = {outcome.rank for outcome in exit_reports.read_reports(folder)}
        for rank, process in ranks.items():
            if rank not in reported_ranks:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    timer = threading.Timer(PEER_GRACE, kill)
    timer.daemon = True
    timer.start()


class Watchdog:
    """Timer that dumps the stacks of the ranks and ends their processes after a timeout."""

    def __init__(self, timeout: float | None, folder: Path) -> None:
        self._timeout, self._folder = timeout, folder
        self._fired = threading.Event()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> None:
        if self._timeout is not None:
            self._timer = threading.Timer(self._timeout, self._handle_timeout)
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def apply_timeout(self, outcome: Outcome) -> Outcome:
        """Outcome ``timeout`` with the blocking ranks if the timer fired, else ``outcome``."""
        if not self._fired.is_set() or outcome.exit_code == 0:
            return outcome
        reason = f"ran longer than launch.timeout={self._timeout:g} s"
        if outcome.status == "interrupted":
            reason += f"; {outcome.reason}"
        ranks, activity = exit_reports.blocking_ranks(self._folder)
        if ranks:
            names = ", ".join(str(rank) for rank in ranks)
            reason += f"; rank{'s' if len(ranks) > 1 else ''} {names} {activity}"
        rank = ranks[0] if len(ranks) == 1 else None
        return Outcome("timeout", reason, rank, exit_reports.rank_stacks(self._folder))

    def _handle_timeout(self) -> None:
        self._fired.set()
        for rank in processes.rank_processes():
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1)
        processes.terminate(processes.descendants(), TIMEOUT_GRACE)


def _signal_outcome(number: int, folder: Path) -> Outcome:
    reports = exit_reports.read_reports(folder)
    reasons = [outcome.reason for outcome in reports if outcome.status == "interrupted"]
    name = signal.Signals(number).name
    reason = f"{name} before a checkpoint could be saved"
    if any(outcome.status == "ok" for outcome in reports):
        reason = f"{name} after the last step"
    reason = reasons[0] if reasons else reason
    return Outcome("interrupted", reason, None, (), int(number))


def _failure_outcome(error: ChildFailedError, folder: Path, memory_kill: bool) -> Outcome:
    """Outcome of the first cause: a rank killed without an exit report, else the earliest report.

    Reports of peer failures come last.
    """
    outcomes = exit_reports.read_reports(folder)
    reported_ranks = {outcome.rank for outcome in outcomes}
    causes = [
        outcome for outcome in outcomes if outcome.status not in ("ok", "pruned", "interrupted")
    ]
    has_cause = any(not cause.peer_failure for cause in causes)
    for rank, failure in sorted(error.failures.items()):
        if has_cause and failure.exitcode == -signal.SIGABRT:
            continue  # NCCL aborts a rank that waits for a failed one
        if failure.exitcode < 0 and rank not in reported_ranks:
            name = signal.Signals(-failure.exitcode).name
            if memory_kill:
                return Outcome("out_of_memory", f"the kernel killed rank {rank} for memory", rank)
            if stacks := exit_reports.crash_dump(folder, rank):
                logger.error(stacks)
            return exit_reports.read_crash(folder, rank) or Outcome(
                "failed", f"rank {rank} was killed by {name}", rank
            )
    if causes:
        return min(causes, key=lambda cause: cause.peer_failure)
    if outcomes and outcomes[0].status == "interrupted":
        return outcomes[0]
    rank, failure = error.get_first_failure()
    return Outcome("failed", f"rank {rank} ended with exit code {failure.exitcode}", rank)


@contextmanager
def _silence_elastic_log() -> Iterator[None]:
    """Suppress the log of torch elastic, whose information is in the status."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(ELASTIC)]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


ORPHAN_GRACE_S = 10.0
"""Maximum time for a rank to save a checkpoint after its launcher died, in seconds."""

LAUNCHER_LOST_WAIT_S = 1.0
"""Delay of the exit after a peer failure, in seconds: the launcher sees the peer first."""


def run_with_affinity(
    affinity: ResourceAffinity, entry: Callable[..., None], *arguments: object
) -> None:
    """Call ``entry(*arguments)`` with the resource affinity of the launcher."""
    set_affinity_and_threads(affinity)
    rendezvous.use_loopback()
    entry(*arguments)


def train_as_rank(
    run: RunConfig, folder: Path, resume: Path | None, tracking_metadata: dict[str, object] | None
) -> None:
    """Train as a rank; ``RANK`` and the other variables are set as by torchrun.

    Writes its exit report to ``folder`` and exits with the exit code of the outcome.
    """
    try:
        begin_rank(folder, run.launch.grace)
        outcome = run_ranks(InProcess(), run, folder, resume, tracking_metadata)
    except Exception as error:  # before training started
        outcome = outcome_of_exception(error, int(os.environ["RANK"]))
        exit_reports.write_report(folder, int(os.environ["RANK"]), outcome)
    end_rank(outcome)


def begin_rank(folder: Path, grace: float) -> None:
    """Set up signal handlers, dumps and the watch of the launcher in this rank process."""
    # Data loader workers have to be forked: spawned ones cannot import a trusted package of the
    # current folder.
    reset_start_method()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by the fork server
    exit_reports.dump_stacks_on_signal(folder, int(os.environ["RANK"]))
    exit_reports.dump_stacks_on_crash(folder, int(os.environ["RANK"]))
    flight_recorder.enable_recorder(folder, os.environ)
    _end_with_launcher(min(grace, ORPHAN_GRACE_S))


def end_rank(outcome: Outcome) -> None:
    """Exit with the exit code of the outcome unless it is 0."""
    if outcome.peer_failure:
        time.sleep(LAUNCHER_LOST_WAIT_S)
    if outcome.exit_code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of a failed process group block the exit of the interpreter.
        os._exit(outcome.exit_code)


def _end_with_launcher(grace: float) -> None:
    """Send SIGTERM to this process when the launcher has ended, and exit after ``grace`` seconds.

    The parent is the launcher, not the forkserver, which lives as long as its ranks.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()
