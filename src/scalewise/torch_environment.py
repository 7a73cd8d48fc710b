"""Environment variables that torch reads when it is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
"""Variables of the allocator's settings; torch reads the first one that is set."""


def set_torch_variables(environment: MutableMapping[str, str]) -> None:
    """Set variables that the user has not set; call before torch is imported.

    - Expandable segments of the CUDA allocator: less fragmentation, thus less reserved memory.
    - Few spins of OpenMP threads, which are 10x slower on a busy processor.
    """
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
