"""The cores and the CUDA devices that a process computes on, handed from one to the next.

What a fork server starts has the seat of the server; its ranks are to have that of their launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Seat:
    """Where a process computes."""

    cores: frozenset[int]
    gpus: str | None
    """``CUDA_VISIBLE_DEVICES``; None: as it is."""


def of_this_process() -> Seat:
    """Returns the seat of this process."""
    return Seat(frozenset(os.sched_getaffinity(0)), os.environ.get(VISIBLE))


def take(seat: Seat) -> None:
    """Moves this process there; before CUDA starts in it."""
    if seat.gpus is not None:
        os.environ[VISIBLE] = seat.gpus
    if seat.cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, seat.cores)


def compute_in(seat: Seat) -> None:
    """Moves this process there, and lets torch compute on no more threads than it has cores."""
    import torch

    take(seat)
    if len(seat.cores) < torch.get_num_threads():
        torch.set_num_threads(len(seat.cores))
