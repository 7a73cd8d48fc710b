"""What an exception means for a job: the ending that it stands for."""

from __future__ import annotations

import sys
import traceback

from scalewise import failures
from scalewise.errors import ConfigError, Interrupted, Pruned, ScalewiseError
from scalewise.launch.status import Outcome
from scalewise.redaction import redact

LOG_LINES, LINE_LENGTH = 12, 500
LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""What gloo and NCCL say when a rank at the other end is gone."""


def outcome_of_exception(error: BaseException, rank: int | None) -> Outcome:
    """Returns the ending that an exception stands for."""
    reason = failures.exception_message(error)
    lines = redact("".join(traceback.format_exception(error))).splitlines()[-LOG_LINES:]
    tail = tuple(line[:LINE_LENGTH] for line in lines)
    if isinstance(error, Interrupted):
        return Outcome("interrupted", reason, rank, (), error.signal_number)
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", "SIGINT before the first step", rank, (), 2)
    if isinstance(error, Pruned):
        return Outcome("pruned", reason, rank)
    if isinstance(error, ConfigError):
        return Outcome("refused", "; ".join(str(c) for c in error.issues), rank)
    if is_out_of_memory(error):
        return Outcome("out_of_memory", reason, rank, tail)
    if isinstance(error, ScalewiseError):
        return Outcome("failed", reason, rank)
    bereft = isinstance(error, RuntimeError) and any(sign in reason for sign in LOST_RANK)
    reason = "lost contact with another rank" if bereft else failures.describe_exception(error)
    return Outcome("failed", reason, rank, tail, peer_failure=bereft)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that the device or the host had no memory left."""
    torch = sys.modules.get("torch")  # else it cannot have raised anything
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    signs = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error).lower() for sign in signs
    )
