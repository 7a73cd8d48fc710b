"""Outcomes of exceptions."""

from __future__ import annotations

import sys
import traceback

from scalewise import failures
from scalewise.errors import ConfigError, Interrupted, Pruned, ScalewiseError
from scalewise.launch.status import Outcome
from scalewise.redaction import redact

LOG_LINES, LINE_LENGTH = 12, 500
"""Maximum number and length of the lines of a log tail."""
PEER_FAILURE_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)
"""Error messages of gloo and NCCL after the failure of a peer."""


def outcome_of_exception(error: BaseException, rank: int | None) -> Outcome:
    """Outcome of a job that an exception ended."""
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
    peer_failure = isinstance(error, RuntimeError) and any(
        message in reason for message in PEER_FAILURE_MESSAGES
    )
    reason = (
        "lost the connection to another rank"
        if peer_failure
        else failures.describe_exception(error)
    )
    return Outcome("failed", reason, rank, tail, peer_failure=peer_failure)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host is out of memory."""
    torch = sys.modules.get("torch")  # only an imported torch raises
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    messages = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(
        message in str(error).lower() for message in messages
    )
