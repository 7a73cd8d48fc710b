"""The cores and the CUDA devices that a process computes on, handed from one to the next.

What a fork server starts has the seat of the server; its ranks are to have that of their launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ResourceAffinity:
    """Where a process computes."""

    cores: frozenset[int]
    gpus: str | None
    """``CUDA_VISIBLE_DEVICES``; None: as it is."""


def current_affinity() -> ResourceAffinity:
    """Returns the seat of this process."""
    return ResourceAffinity(frozenset(os.sched_getaffinity(0)), os.environ.get(VISIBLE_DEVICES))


def set_affinity(affinity: ResourceAffinity) -> None:
    """Moves this process there; before CUDA starts in it."""
    if affinity.gpus is not None:
        os.environ[VISIBLE_DEVICES] = affinity.gpus
    if affinity.cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, affinity.cores)


def set_affinity_and_threads(affinity: ResourceAffinity) -> None:
    """Moves this process there, and lets torch compute on no more threads than it has cores."""
    import torch

    set_affinity(affinity)
    if len(affinity.cores) < torch.get_num_threads():
        torch.set_num_threads(len(affinity.cores))
