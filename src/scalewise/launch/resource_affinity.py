"""CPU cores and CUDA devices of a process.

Processes that the forkserver starts inherit its affinity and have to be given their launcher's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ResourceAffinity:
    """CPU cores and CUDA devices of a process."""

    cores: frozenset[int]
    """Numbers of the CPU cores."""
    gpus: str | None
    """``CUDA_VISIBLE_DEVICES``; None: unchanged."""


def current_affinity() -> ResourceAffinity:
    """Affinity of this process."""
    return ResourceAffinity(frozenset(os.sched_getaffinity(0)), os.environ.get(VISIBLE_DEVICES))


def set_affinity(affinity: ResourceAffinity) -> None:
    """Set the affinity of this process; call before CUDA is initialized."""
    if affinity.gpus is not None:
        os.environ[VISIBLE_DEVICES] = affinity.gpus
    if affinity.cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, affinity.cores)


def set_affinity_and_threads(affinity: ResourceAffinity) -> None:
    """Set the affinity and limit the threads of torch to the number of cores."""
    import torch

    set_affinity(affinity)
    if len(affinity.cores) < torch.get_num_threads():
        torch.set_num_threads(len(affinity.cores))
