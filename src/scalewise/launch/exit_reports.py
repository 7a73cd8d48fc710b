"""The word that each rank leaves of how it ended, for the process that started it."""

from __future__ import annotations

import faulthandler
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scalewise import atomic, regular_files
from scalewise.failures import report_errors
from scalewise.launch.status import Outcome
from scalewise.tracking.run_files import read_json, write_json

_FOLDER = ".ranks"
REPORT_BYTES = 16384
"""Bytes reserved for a rank's word: a reason and the last lines of its traceback."""
MAX_FRAMES = 4


def prepare_reports(folder: Path) -> None:
    """Makes room under a run's ``folder`` for the words of one attempt."""
    _remove_folder(folder)
    (folder / _FOLDER).mkdir()


def remove_reports(folder: Path) -> None:
    """Removes the words, and the space reserved for the status, which has what matters of them."""
    _remove_folder(folder)
    atomic.release_space(folder / "status.json")


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def reserve_report(folder: Path, rank: int) -> None:
    """Reserves the disk space that ``leave`` needs, if it is free."""
    with suppress(OSError):
        atomic.reserve_space(folder / _FOLDER / f"{rank}.json", REPORT_BYTES)


def write_report(folder: Path, rank: int, outcome: Outcome) -> None:
    """Leaves the word of one rank; a full disk costs the log's tail, or the word."""
    for log_tail in (list(outcome.log_tail), []):
        word = {
            "time": time.time(),
            "status": outcome.status,
            "reason": outcome.reason,
            "log_tail": log_tail,
            "signal_number": outcome.signal_number,
            "bereft": outcome.peer_failure,
        }
        with report_errors(f"rank {rank} cannot write how it ended"):
            write_json(folder / _FOLDER / f"{rank}.json", word)
            return


def read_reports(folder: Path) -> list[Outcome]:
    """Returns the endings that ranks left under ``folder``, the earliest first."""
    found: list[tuple[float, Outcome]] = []
    for file in (folder / _FOLDER).glob("*.json"):
        word = read_json(file)
        if word:
            outcome = Outcome(
                str(word["status"]),
                str(word["reason"]),
                int(file.stem),
                tuple(str(line) for line in _stack_lines(word["log_tail"])),
                int(str(word["signal_number"])),
                bool(word["bereft"]),
            )
            found.append((float(str(word["time"])), outcome))
    return [outcome for _, outcome in sorted(found, key=lambda pair: pair[0])]


def lost_rank_reason(folder: Path, ranks: int) -> Outcome | None:
    """Returns why one of so many ranks was lost: what it said, else that it said nothing."""
    outcomes = read_reports(folder)
    for outcome in outcomes:
        if outcome.status not in ("ok", "interrupted") and not outcome.peer_failure:
            return outcome
    silent = sorted(set(range(ranks)) - {outcome.rank for outcome in outcomes})
    if not silent:
        return None
    if len(silent) == 1:
        return Outcome("failed", f"rank {silent[0]} was killed: it left no word", silent[0])
    names = ", ".join(map(str, silent))
    return Outcome("failed", f"ranks {names} were killed: they left no word")


def dump_stacks_on_signal(folder: Path, rank: int) -> None:
    """Makes SIGUSR1 write down where this process is, even if it answers to nothing else."""
    file = (folder / _FOLDER / f"{rank}.stack").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def rank_stacks(folder: Path) -> tuple[str, ...]:
    """Returns the innermost frames of each rank that was asked where it is."""
    return tuple(
        f"rank {rank}: {frame}" for rank, frames in _request_stacks(folder) for frame in frames
    )


def blocking_ranks(folder: Path) -> tuple[list[int], str]:
    """Returns the ranks that held up the others when all were asked, and what they did instead.

    Those are the ranks that neither answered nor had ended. If there is none, it is the one rank
    that did not wait: a rank that waits is somewhere inside torch. May be empty.
    """
    asked = _request_stacks(folder)
    ended = {outcome.rank for outcome in read_reports(folder)}
    if silent := [rank for rank, frames in asked if not frames and rank not in ended]:
        return silent, "did not answer"
    elsewhere = [rank for rank, frames in asked if frames and "/torch/" not in frames[0]]
    return elsewhere if len(elsewhere) == 1 else [], "stood still while the others waited for it"


def _request_stacks(folder: Path) -> list[tuple[int, list[str]]]:
    """Returns the innermost frames by rank; none of a rank that did not answer."""
    found: list[tuple[int, list[str]]] = []
    for file in (folder / _FOLDER).glob("*.stack"):
        lines = regular_files.read_text(file).splitlines()
        found.append(
            (int(file.stem), [line.strip() for line in lines if "File" in line][:MAX_FRAMES])
        )
    return sorted(found)


def _stack_lines(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []
