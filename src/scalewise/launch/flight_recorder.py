"""NCCL Flight Recorder: the last collectives of each rank, in the run folder after a timeout.

``torchfrtrace --prefix flight_recorder_rank_ FOLDER`` names the collective that a rank did not
join.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from scalewise.launch.outcomes import Outcome

FILE_PREFIX = "flight_recorder_rank_"
"""Name of a dump, followed by the rank."""
BUFFER_SIZE = 2000
"""Number of recorded collectives of a rank."""


def enable_recorder(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Dump the last collectives of this rank to ``folder`` if a collective times out.

    Variables in ``environment`` that the user has set are not changed.
    """
    variables = (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", str(BUFFER_SIZE)),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", "1"),
        (
            "TORCH_FR_DUMP_TEMP_FILE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            str(folder.absolute() / FILE_PREFIX),
        ),
    )
    for name, other_name, value in variables:
        if other_name not in environment:
            environment.setdefault(name, value)


def add_dump_path(outcome: Outcome, folder: Path) -> Outcome:
    """Outcome whose reason names the dumps in ``folder``, if a failure left any."""
    has_dump = next(folder.glob(f"{FILE_PREFIX}*"), None) is not None
    if outcome.status not in ("failed", "timeout") or not has_dump:
        return outcome
    dump_path = folder / f"{FILE_PREFIX}*"
    return replace(outcome, reason=f"{outcome.reason}; NCCL Flight Recorder: {dump_path}")
