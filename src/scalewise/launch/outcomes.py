"""Outcome of a job, and the outcomes of exceptions."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from dataclasses import dataclass, replace

from scalewise import failures
from scalewise.errors import EXIT_CODES, ConfigError, Interrupted, Pruned, ScalewiseError
from scalewise.redaction import redact

LOG_LINES, LINE_LENGTH = 12, 500
"""Maximum number and length of the lines of a log tail."""
PEER_FAILURE_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
    "remote process exiting prematurely",
    "NCCL communicator was aborted",
)
"""Error messages of gloo and NCCL after the failure of a peer."""

INCOMPLETE_LIBRARY = re.compile(r"(/\S+\.so): (?:file too short|invalid ELF header)")
"""Error message of the dynamic loader for a library whose compiler was ended while it wrote."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job or of one attempt at it."""

    status: str
    """ok, pruned, failed, out_of_memory, timeout, interrupted or refused."""
    reason: str = ""
    """Reason of the status; empty for ``ok``."""
    rank: int | None = None
    """Rank that failed first, if known."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the traceback of that rank."""
    signal_number: int = 0
    """Signal that interrupted the job; 0: none."""
    peer_failure: bool = False
    """Whether the rank failed only because another rank failed."""

    def after_signal(self, signal_number: int) -> Outcome:
        """Outcome of a job whose process received a signal; 0: none.

        A signal also causes other failures: it ends a compiler in the same process group.
        """
        if not signal_number or self.status in ("ok", "pruned", "interrupted"):
            return self
        reason = f"{signal.Signals(signal_number).name}, then {self.reason}"
        return replace(self, status="interrupted", reason=reason, signal_number=signal_number)

    @property
    def exit_code(self) -> int:
        """Process exit code of the outcome."""
        if self.status == "interrupted":
            return 128 + self.signal_number
        return EXIT_CODES[self.status]


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
    if library := INCOMPLETE_LIBRARY.search(str(error)):
        reason = f"{library[1]} is incomplete: its compilation was interrupted; remove this file"
    return Outcome("failed", reason, rank, tail, peer_failure=peer_failure)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host is out of memory."""
    torch = sys.modules.get("torch")  # only an imported torch raises
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    messages = (
        "can't allocate memory",
        "out of memory",
        "cannot allocate memory",
        "_status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT: no workspace
        "cufft_alloc_failed",
        "device_allocation_failed",  # cuDNN 9
    )
    return isinstance(error, RuntimeError | OSError) and any(
        message in str(error).lower() for message in messages
    )
