"""Execution of a measurement in rank processes, launched like those of a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.launch import elastic, exit_reports
from scalewise.launch.outcomes import Outcome, outcome_of_exception
from scalewise.launch_config import Launch

GRACE_SECONDS = 2.0
"""Grace period after a signal; a measurement has nothing to save."""


def run_ranks(task: Callable[[], None], ranks: int, folder: Path) -> None:
    """Call a picklable ``task`` in each of ``ranks`` processes under torch elastic.

    All processes have ended when it returns or raises.

    Raises:
        Interrupted: a signal stopped the measurement.
        ScalewiseError: a rank failed; with the reason of the first one.
    """
    try:
        outcome = elastic.run_entry(
            ranks, _serve_task, (task, folder), folder, Launch(grace=GRACE_SECONDS)
        )
    finally:
        exit_reports.remove_reports(folder)
    if outcome.status == "interrupted":
        name = signal.Signals(outcome.signal_number).name
        raise Interrupted(outcome.signal_number, f"{name} while measuring; nothing was written")
    if outcome.status != "ok":
        tail = "\n".join(outcome.log_tail)
        raise ScalewiseError(f"{outcome.status}: {outcome.reason}\n{tail}".rstrip())


def _serve_task(task: Callable[[], None], folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    elastic.begin_rank(folder, GRACE_SECONDS)
    rank = int(os.environ["RANK"])
    try:
        task()
        outcome = Outcome("ok")
    except Exception as error:  # reported to the launcher
        outcome = outcome_of_exception(error, rank)
    exit_reports.write_report(folder, rank, outcome)
    elastic.end_rank(outcome)


def check_ranks(ranks: int, key: str, num_gpus: int | None, max_cpu_ranks: int) -> None:
    """Raise ``ConfigError`` for a number of ranks that this machine cannot measure.

    Args:
        ranks: Number of ranks.
        key: Config key of the number, for errors.
        num_gpus: Number of CUDA devices; None: the ranks run on the CPU.
        max_cpu_ranks: Maximum number of ranks on the CPU.
    """
    if num_gpus is not None and max(ranks, 2) > num_gpus:
        fix = "set hardware=cpu, or use a machine with more devices"
        reason = f"requires {max(ranks, 2)} CUDA devices; this machine has {num_gpus}"
        raise ConfigError.for_key(key, ranks, reason, fix)
    if ranks < 2:
        raise ConfigError.for_key(key, ranks, "must be 2 or more", f"set {key}=2")
    if num_gpus is None and ranks > max_cpu_ranks:
        reason = f"exceeds the maximum of {max_cpu_ranks} CPU ranks of this machine"
        raise ConfigError.for_key(key, ranks, reason)
