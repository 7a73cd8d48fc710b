"""Signal handling outside training, where a signal raises an exception.

Slurm sends SIGUSR2 before the time limit of a job.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from scalewise.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""Signals that end a job."""


class _SignalReceived(BaseException):
    """Raised by signal handlers; a ``BaseException``, which ``except Exception`` does not catch."""


_received: list[int] = []
"""Received signals whose exception has not reached ``raise_on_signals``."""


class _Ending:
    """Whether an ``Interrupted`` was raised and no other block has started since."""

    active = False


@contextmanager
def raise_on_signals(when: str) -> Iterator[None]:
    """Raise ``Interrupted`` from the block on a signal; the message ends with ``when``.

    This includes signals whose exception a library replaced by its own in a ``finally`` clause. If
    a library suppressed the exception, it is raised at the end of the block, or at the start of the
    next nested block.

    After an ``Interrupted``, signals have no effect until the next block starts, so that a second
    Ctrl-C does not keep callers from recording the first.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _Ending.active:
            _received.append(number)
            raise _SignalReceived

    if _received:
        raise _SignalReceived
    _Ending.active = False
    try:
        with forward_signals(interrupt):
            try:
                yield
            finally:
                _Ending.active = bool(_received)
    except BaseException:
        if not _received:
            raise
    if _received:
        number, *_ = _received
        _received.clear()
        raise Interrupted(number, f"{signal.Signals(number).name} {when}")


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore signals inside the block."""
    with forward_signals(signal.SIG_IGN):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Handle signals at the end of the block, e.g. of imports of torch.

    Exceptions of signal handlers abort the process in functions that C++ code calls.
    """
    received: list[int] = []
    try:
        with forward_signals(lambda number, frame: received.append(number)):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Restore the current signal handlers at the end of the block."""
    with forward_signals(None):
        yield


@contextmanager
def forward_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers | None,
) -> Iterator[None]:
    """Set ``handler`` for the signals inside the block; None: only restore them at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets handlers in the main thread only
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if handler is not None:
            for number in SIGNALS:
                # nohup ignores SIGHUP.
                if not (number == signal.SIGHUP and handlers[number] is signal.SIG_IGN):
                    signal.signal(number, handler)
        yield
    finally:
        for number, handler_before in handlers.items():
            signal.signal(number, handler_before)
