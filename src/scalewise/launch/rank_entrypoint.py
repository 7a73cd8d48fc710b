"""Entry point of rank processes, without heavy imports for launchers that only start ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scalewise.launch import exit_reports, rendezvous
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.processes import reset_start_method
from scalewise.launch.resource_affinity import ResourceAffinity, set_affinity_and_threads
from scalewise.launch.status import Outcome
from scalewise.run_config import RunConfig

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
    from scalewise.launch.rank_worker import run_attempt

    try:
        begin_rank(folder, run.launch.grace)
        outcome = run_attempt(run, folder, resume, tracking_metadata)
    except Exception as error:  # before training started
        outcome = outcome_of_exception(error, int(os.environ["RANK"]))
        exit_reports.write_report(folder, int(os.environ["RANK"]), outcome)
    end_rank(outcome)


def begin_rank(folder: Path, grace: float) -> None:
    """Set up signal handlers, stack dumps and the watch of the launcher in this rank process."""
    # Data loader workers have to be forked: spawned ones cannot import a trusted package of the
    # current folder.
    reset_start_method()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by the fork server
    exit_reports.dump_stacks_on_signal(folder, int(os.environ["RANK"]))
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
