"""Signals outside training: an exception where a job can still be called off.

SIGUSR2 is how Slurm says that a job's time is nearly up.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from scalewise.errors import Interrupted

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


class _SignalReceived(BaseException):
    """On its way out: no ``except Exception`` of a library in between may swallow it."""


_received: list[int] = []
"""Signals that are on their way out, or that a library has lost on it."""


@contextmanager
def raise_on_signals(when: str) -> Iterator[None]:
    """Leaves the block with ``Interrupted`` on a signal; its message says ``when`` it came.

    Also where a ``finally`` of a library put an error of its own in its place. Where somebody has
    swallowed that too, the block is left at its end, or where the next one inside it begins.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        raise _SignalReceived

    if _received:
        raise _SignalReceived
    try:
        with forward_signals(interrupt):
            yield
    except BaseException:
        if not _received:
            raise
    if _received:
        number, *_ = _received
        _received.clear()
        raise Interrupted(number, f"{signal.Signals(number).name} {when}")


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Lets a few lines finish what nobody would finish after them."""
    with forward_signals(signal.SIG_IGN):
        yield


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Puts back the handlers of now, whoever takes them meanwhile."""
    with forward_signals(None):
        yield


@contextmanager
def forward_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers | None,
) -> Iterator[None]:
    """Gives signals to ``handler``, then to whoever had them before; None changes nothing yet."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread, and sets them only there
        return
    held = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        if handler is not None:
            for number in NUMBERS:
                if not (number == signal.SIGHUP and held[number] is signal.SIG_IGN):  # by nohup
                    signal.signal(number, handler)
        yield
    finally:
        for number, before in held.items():
            signal.signal(number, before)
