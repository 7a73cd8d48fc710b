"""The word that each rank leaves of how it ended, for the process that started it."""

from __future__ import annotations

import faulthandler
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from scalewise.launch.status import Ending
from scalewise.tracking.files import read_json, write_json

_FOLDER = ".ranks"
FRAMES = 4


def clear(folder: Path) -> None:
    """Makes room under a run's ``folder`` for the words of one attempt."""
    remove(folder)
    (folder / _FOLDER).mkdir()


def remove(folder: Path) -> None:
    """Removes the words; the status has what matters of them."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def leave(folder: Path, rank: int, ending: Ending) -> None:
    """Leaves the word of one rank; a full disk costs the word and nothing else."""
    try:
        write_json(
            folder / _FOLDER / f"{rank}.json",
            {
                "time": time.time(),
                "status": ending.status,
                "reason": ending.reason,
                "log_tail": list(ending.log_tail),
                "signal_number": ending.signal_number,
                "bereft": ending.bereft,
            },
        )
    except OSError:
        traceback.print_exc()


def said(folder: Path) -> list[Ending]:
    """Returns the endings that ranks left under ``folder``, the earliest first."""
    found: list[tuple[float, Ending]] = []
    for file in (folder / _FOLDER).glob("*.json"):
        word = read_json(file)
        if word:
            ending = Ending(
                str(word["status"]),
                str(word["reason"]),
                int(file.stem),
                tuple(str(line) for line in _lines(word["log_tail"])),
                int(str(word["signal_number"])),
                bool(word["bereft"]),
            )
            found.append((float(str(word["time"])), ending))
    return [ending for _, ending in sorted(found, key=lambda pair: pair[0])]


def tell_where(folder: Path, rank: int) -> None:
    """Makes SIGUSR1 write down where this process is, even if it answers to nothing else."""
    file = (folder / _FOLDER / f"{rank}.stack").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def stacks(folder: Path) -> tuple[str, ...]:
    """Returns the innermost frames of each rank that was asked where it is."""
    lines: list[str] = []
    for file in sorted((folder / _FOLDER).glob("*.stack")):
        frames = [line.strip() for line in file.read_text("utf-8").splitlines() if "File" in line]
        lines += [f"rank {file.stem}: {frame}" for frame in frames[:FRAMES]]
    return tuple(lines)


def standing_still(folder: Path) -> int | None:
    """Returns the one rank that did not wait for the others when it was asked; None: no such one.

    A rank that waits is somewhere inside torch; the one that holds it up is not.
    """
    innermost = {}
    for line in reversed(stacks(folder)):
        rank, _, frame = line.removeprefix("rank ").partition(": ")
        innermost[int(rank)] = frame
    elsewhere = [rank for rank, frame in innermost.items() if "/torch/" not in frame]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _lines(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []
