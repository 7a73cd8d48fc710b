"""What an exception means for a job: the ending that it stands for."""

from __future__ import annotations

import sys
import traceback

from scalewise import failures
from scalewise.errors import ConfigError, Interrupted, Pruned, ScalewiseError
from scalewise.launch.status import Ending
from scalewise.redaction import redacted

LOG_LINES, LINE_LENGTH = 12, 500
LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""What gloo and NCCL say when a rank at the other end is gone."""


def classify(error: BaseException, rank: int | None) -> Ending:
    """Returns the ending that an exception stands for."""
    reason = failures.message(error)
    lines = redacted("".join(traceback.format_exception(error))).splitlines()[-LOG_LINES:]
    tail = tuple(line[:LINE_LENGTH] for line in lines)
    if isinstance(error, Interrupted):
        return Ending("interrupted", reason, rank, (), error.signal_number)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", "SIGINT before the first step", rank, (), 2)
    if isinstance(error, Pruned):
        return Ending("pruned", reason, rank)
    if isinstance(error, ConfigError):
        return Ending("refused", "; ".join(str(c) for c in error.complaints), rank)
    if ran_out_of_memory(error):
        return Ending("out_of_memory", reason, rank, tail)
    if isinstance(error, ScalewiseError):
        return Ending("failed", reason, rank)
    bereft = isinstance(error, RuntimeError) and any(sign in reason for sign in LOST_RANK)
    reason = "lost contact with another rank" if bereft else failures.describe(error)
    return Ending("failed", reason, rank, tail, bereft=bereft)


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that the device or the host had no memory left."""
    torch = sys.modules.get("torch")  # else it cannot have raised anything
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    signs = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error).lower() for sign in signs
    )
