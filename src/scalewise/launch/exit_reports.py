"""Exit reports: files in which ranks record their outcome for the process that started them."""

from __future__ import annotations

import faulthandler
import re
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scalewise import atomic, regular_files
from scalewise.failures import report_errors
from scalewise.launch.outcomes import LINE_LENGTH, LOG_LINES, Outcome
from scalewise.run_files import read_json, write_json

_FOLDER = ".ranks"
REPORT_BYTES = 16384
"""Disk space reserved for an exit report, in bytes: the reason and the end of the traceback."""
MAX_FRAMES = 4
"""Maximum number of stack frames per rank."""
_FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""Signals by their name in the dumps of ``faulthandler``."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in ')


def prepare_reports(folder: Path) -> None:
    """Create an empty folder for the exit reports of one attempt."""
    _remove_folder(folder)
    (folder / _FOLDER).mkdir()


def remove_reports(folder: Path) -> None:
    """Remove the exit reports and the disk space reserved for ``status.json``."""
    _remove_folder(folder)
    atomic.release_space(folder / "status.json")


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def reserve_report(folder: Path, rank: int) -> None:
    """Reserve disk space for the exit report of a rank, if available."""
    with suppress(OSError):
        atomic.reserve_space(folder / _FOLDER / f"{rank}.json", REPORT_BYTES)


def write_report(folder: Path, rank: int, outcome: Outcome) -> None:
    """Write the exit report of a rank; on a full disk without the log tail, or not at all."""
    for log_tail in (list(outcome.log_tail), []):
        report = {
            "time": time.time(),
            "status": outcome.status,
            "reason": outcome.reason,
            "log_tail": log_tail,
            "signal_number": outcome.signal_number,
            "peer_failure": outcome.peer_failure,
        }
        with report_errors(f"rank {rank} cannot write its exit report"):
            write_json(folder / _FOLDER / f"{rank}.json", report)
            return


def read_reports(folder: Path) -> list[Outcome]:
    """Outcomes in the exit reports under ``folder``, the earliest first."""
    outcomes: list[tuple[float, Outcome]] = []
    for file in (folder / _FOLDER).glob("*.json"):
        report = read_json(file)
        if report:
            outcome = Outcome(
                str(report["status"]),
                str(report["reason"]),
                int(file.stem),
                tuple(str(line) for line in _as_list(report["log_tail"])),
                int(str(report["signal_number"])),
                bool(report["peer_failure"]),
            )
            outcomes.append((float(str(report["time"])), outcome))
    return [outcome for _, outcome in sorted(outcomes, key=lambda pair: pair[0])]


def first_failure(folder: Path) -> Outcome | None:
    """Outcome of the rank that failed first by itself; None without one."""
    failures = (
        outcome
        for outcome in read_reports(folder)
        if outcome.status not in ("ok", "interrupted") and not outcome.peer_failure
    )
    return next(failures, None)


def lost_rank_reason(folder: Path, ranks: int) -> Outcome | None:
    """Outcome of the rank that failed first, or that has no exit report; None without one."""
    if failure := first_failure(folder):
        return failure
    reported_ranks = {outcome.rank for outcome in read_reports(folder)}
    silent_ranks = sorted(set(range(ranks)) - reported_ranks)
    if not silent_ranks:
        return None
    if crashes := list(filter(None, (read_crash(folder, rank) for rank in silent_ranks))):
        return crashes[0]
    if len(silent_ranks) == 1:
        return Outcome(
            "failed", f"rank {silent_ranks[0]} was killed without an exit report", silent_ranks[0]
        )
    names = ", ".join(map(str, silent_ranks))
    return Outcome("failed", f"ranks {names} were killed without an exit report")


def dump_stacks_on_signal(folder: Path, rank: int) -> None:
    """Dump the stack of this process to a file on SIGUSR1, even if it hangs."""
    file = (folder / _FOLDER / f"{rank}.stack").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def dump_stacks_on_crash(folder: Path, rank: int) -> None:
    """Dump the stacks of this process to a file on SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL."""
    faulthandler.enable(_crash_file(folder, rank).open("w", encoding="utf-8"))


def crash_dump(folder: Path, rank: int) -> str:
    """Stacks of a rank at a fatal signal; empty without one."""
    file = _crash_file(folder, rank)
    return regular_files.read_text(file, errors="replace") if file.exists() else ""


def read_crash(folder: Path, rank: int) -> Outcome | None:
    """Outcome of a rank that a fatal signal killed, with its innermost frames; None without one."""
    title, *stacks = crash_dump(folder, rank).split("\n\n")
    number = _FATAL_SIGNALS.get(title.strip().removeprefix("Fatal Python error: "))
    if number is None:
        return None
    threads = [stack for stack in stacks if "(most recent call first)" in stack]
    thread = next((stack for stack in threads if stack.startswith("Current thread")), "")
    where = "in"
    if not _FRAME.search(thread) and threads:
        thread = threads[-1]  # the main thread, as the newest one is first
        where = "in a native thread, with the main thread in"
    frame = _FRAME.search(thread)
    location = f" {where} {frame[1]}:{frame[2]}" if frame else ""
    frames = [line.strip() for line in thread.splitlines() if _FRAME.search(line)]
    tail = [*reversed(frames[: LOG_LINES - 1]), title.strip()]
    return Outcome(
        "failed",
        f"rank {rank} was killed by {number.name}{location}",
        rank,
        tuple(line[:LINE_LENGTH] for line in tail),
    )


def _crash_file(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"{rank}.crash"


def rank_stacks(folder: Path) -> tuple[str, ...]:
    """Innermost stack frames of the ranks that dumped them."""
    return tuple(
        f"rank {rank}: {frame}" for rank, frames in _read_stacks(folder) for frame in frames
    )


def blocking_ranks(folder: Path) -> tuple[list[int], str]:
    """Ranks that blocked the others at a timeout, and a description of their activity.

    These are the ranks that dumped no stack and have not ended; else the only rank whose innermost
    frame is outside torch, as waiting ranks are inside torch. May be empty.
    """
    stacks = _read_stacks(folder)
    ended_ranks = {outcome.rank for outcome in read_reports(folder)}
    if silent_ranks := [rank for rank, frames in stacks if not frames and rank not in ended_ranks]:
        return silent_ranks, "did not respond"
    outside_torch = [rank for rank, frames in stacks if frames and "/torch/" not in frames[0]]
    return outside_torch if len(outside_torch) == 1 else [], "blocked while the other ranks waited"


def _read_stacks(folder: Path) -> list[tuple[int, list[str]]]:
    """Innermost stack frames by rank; empty for a rank that did not respond."""
    stacks: list[tuple[int, list[str]]] = []
    for file in (folder / _FOLDER).glob("*.stack"):
        lines = regular_files.read_text(file).splitlines()
        stacks.append(
            (int(file.stem), [line.strip() for line in lines if "File" in line][:MAX_FRAMES])
        )
    return sorted(stacks)


def _as_list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []
