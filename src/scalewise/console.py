"""What is printed while work goes on: a reader who has left must not end the work."""

from __future__ import annotations

import logging
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from scalewise.redaction import redact

if TYPE_CHECKING:
    from scalewise.plain_console import PlainConsole

T = TypeVar("T")

MISSING = "–"  # noqa: RUF001 (an en dash is meant)
"""What stands in a table for a number that is not known."""
WIDTH = 150
"""Columns of a table that is written to a file."""
PROGRESS_MIN_ITEMS = 20
"""So many items are worked through with a word about it."""


JOINING_CHARACTERS = "\u200c\u200d"
"""Format characters that scripts and emoji are written with; all others are escaped."""


def printable(text: object, *, spaces: bool = True) -> str:
    """One line of plain text: control, format and bidi characters are written as escapes.

    Lone surrogates, private and unassigned characters are escaped too. ``spaces=False`` also
    escapes spaces other than U+0020, which nobody can tell apart in a quoted value.
    """
    return "".join(c if _is_printable(c, spaces) else ascii(c)[1:-1] for c in str(text))


def _is_printable(character: str, spaces: bool) -> bool:
    if character.isprintable() or character in JOINING_CHARACTERS:
        return True
    return spaces and unicodedata.category(character) == "Zs"


def print_lines(*lines: object, stderr: bool = False, end: str = "\n") -> None:
    """Prints each argument as one line of plain text, at once.

    Every message that may hold text of a user, a file or a server is printed here or on
    :func:`console`: no escape sequence and no line break of it reaches the terminal.
    """
    text = "\n".join(map(printable, lines))
    print(text, end=end, file=sys.stderr if stderr else sys.stdout, flush=True)


def show_progress(items: Sequence[T], verb: str, noun: str) -> Iterator[T]:
    """Yields the items, and says that they are worked through where they are many."""
    if len(items) < PROGRESS_MIN_ITEMS:
        yield from items
        return
    if not os.isatty(1):
        print_lines(f"{verb} {len(items)} {noun} ...")
    with get_console().status("") as status:  # shown on a terminal alone
        for number, item in enumerate(items, start=1):
            status.update(f"{verb} {number} of {len(items)} {noun}")
            yield item


def get_console() -> PlainConsole:
    """Returns where tables are printed: as wide as the terminal, if there is one."""
    from scalewise.plain_console import PlainConsole

    return PlainConsole(width=None if os.isatty(1) else WIDTH)


def open_standard_streams() -> None:
    """Opens the standard streams that are closed on the null device.

    Else the next file or socket that is opened takes their place, and is read or written as such.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


@contextmanager
def shield_streams() -> Iterator[None]:
    """Prints what can be printed of stdout and stderr, and drops the rest without a word."""
    held = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_shield_stream(stream) for stream in held)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # while it is shielded: at its exit Python would complain
        sys.stdout, sys.stderr = held


def redact_logs() -> None:
    """Keeps secrets out of the log files that the root logger writes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setStream(_shield_stream(handler.stream or handler._open()))


def _shield_stream(stream: TextIO | None) -> Any:
    """Returns a stream that never raises; None, a stream closed from the start, stays None."""
    return (
        stream if stream is None or isinstance(stream, _ShieldedStream) else _ShieldedStream(stream)
    )


class _ShieldedStream:
    """A text stream that loses characters rather than raise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # W&B replaces ``write`` to capture the console: it shall see what is written.
        super().__setattr__(name, (lambda t: value(redact(t))) if name == "write" else value)

    def write(self, text: str) -> int:
        """Writes the text without secrets, and with ``?`` for what the encoding lacks."""
        try:
            self._stream.write(redact(text))
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._redirect_to_null()
        return len(text)

    def flush(self) -> None:
        """Sends on what was written, if somebody is there."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Points the stream at nothing, so that what it still holds can be flushed at the exit."""
        with suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)
