"""Work that is measured in ranks of its own, born like those of a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from scalewise.errors import ConfigError, Interrupted, ScalewiseError
from scalewise.launch import exit_reports, rank_entrypoint
from scalewise.launch.config import Launch
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.status import Outcome

GRACE = 2.0
"""Seconds to end in when asked: there is nothing to save."""


def run_ranks(task: Callable[[], None], ranks: int, folder: Path) -> None:
    """Calls a picklable ``task`` in each of ``ranks`` processes under torch elastic.

    Raises ``Interrupted`` for a signal, and ``ScalewiseError`` with the reason of the first rank
    that failed; no process is left.
    """
    from scalewise.launch.elastic import run_entry

    try:
        outcome = run_entry(ranks, _serve_task, (task, folder), folder, Launch(grace=GRACE))
    finally:
        exit_reports.remove_reports(folder)
    if outcome.status == "interrupted":
        name = signal.Signals(outcome.signal_number).name
        raise Interrupted(outcome.signal_number, f"{name} while measuring; nothing was written")
    if outcome.status != "ok":
        tail = "\n".join(outcome.log_tail)
        raise ScalewiseError(f"{outcome.status}: {outcome.reason}\n{tail}".rstrip())


def _serve_task(task: Callable[[], None], folder: Path) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    rank_entrypoint.begin_rank(folder, GRACE)
    number = int(os.environ["RANK"])
    try:
        task()
        outcome = Outcome("ok")
    except Exception as error:  # told to the launcher, whatever it is
        outcome = outcome_of_exception(error, number)
    exit_reports.write_report(folder, number, outcome)
    rank_entrypoint.end_rank(outcome)


def check_ranks(ranks: int, key: str, num_gpus: int | None, max_cpu_ranks: int) -> None:
    """Refuses a number of ranks that measures nothing here.

    ``num_gpus`` is the number of CUDA devices, None for the CPU, which carries ``max_cpu_ranks``
    ranks.
    """
    if num_gpus is not None and max(ranks, 2) > num_gpus:
        fix = "set hardware=cpu, or run it where there are more"
        reason = f"needs {max(ranks, 2)} CUDA devices, this machine has {num_gpus}"
        raise ConfigError.for_key(key, ranks, reason, fix)
    if ranks < 2:
        raise ConfigError.for_key(key, ranks, "there is nobody to send to", f"set {key}=2")
    if num_gpus is None and ranks > max_cpu_ranks:
        raise ConfigError.for_key(
            key, ranks, f"this machine carries at most {max_cpu_ranks} CPU ranks"
        )
