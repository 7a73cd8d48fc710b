"""The start of a rank's process: light, so that whoever only starts ranks imports no Lightning."""

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
"""Seconds in which a rank whose launcher has died may save itself, at the most."""

LAUNCHER_LOST_WAIT_S = 1.0
"""Seconds by which a rank outlives the one it lost, so that the launcher sees that one first."""


def run_with_affinity(
    affinity: ResourceAffinity, entry: Callable[..., None], *arguments: object
) -> None:
    """Calls ``entry(*arguments)`` where its launcher computes, and not where it was forked."""
    set_affinity_and_threads(affinity)
    rendezvous.use_loopback()
    entry(*arguments)


def train_as_rank(
    run: RunConfig, folder: Path, resume: Path | None, tracking_metadata: dict[str, object] | None
) -> None:
    """Trains as one of the ranks; the rank comes from the environment, as torchrun sets it.

    Leaves its word in ``folder`` and ends with its ending's exit code.
    """
    from scalewise.launch.rank_worker import run_attempt

    try:
        begin_rank(folder, run.launch.grace)
        outcome = run_attempt(run, folder, resume, tracking_metadata)
    except Exception as error:  # before training was tried
        outcome = outcome_of_exception(error, int(os.environ["RANK"]))
        exit_reports.write_report(folder, int(os.environ["RANK"]), outcome)
    end_rank(outcome)


def begin_rank(folder: Path, grace: float) -> None:
    """Makes this process a rank: it tells where it is when asked, and ends with its launcher."""
    # A data loader's workers are forked, as on one device: started anew, they could not import
    # a trusted package of the current folder.
    reset_start_method()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by the fork server
    exit_reports.dump_stacks_on_signal(folder, int(os.environ["RANK"]))
    _end_with_launcher(min(grace, ORPHAN_GRACE_S))


def end_rank(outcome: Outcome) -> None:
    """Ends this process with its ending's exit code, unless all is well."""
    if outcome.peer_failure:
        time.sleep(LAUNCHER_LOST_WAIT_S)
    if outcome.exit_code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of a broken process group would hold the interpreter back.
        os._exit(outcome.exit_code)


def _end_with_launcher(grace: float) -> None:
    """Ends this process when the launcher is gone: by SIGTERM, then without asking.

    The fork server between the two is no sign: it lives as long as the ranks.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()
