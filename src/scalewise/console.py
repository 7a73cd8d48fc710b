"""Terminal output: printable text, log messages and streams that never raise."""

from __future__ import annotations

import logging
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

from scalewise.redaction import redact

T = TypeVar("T")

PROGRESS_MIN_ITEMS = 20
"""Smallest number of items for which progress is shown."""
MISSING = "–"  # noqa: RUF001 (an en dash is meant)
"""Table cell of an unknown value."""
JOINING_CHARACTERS = "\u200c\u200d"
"""Format characters of scripts and emoji; all others are escaped."""


def printable(text: object, *, spaces: bool = True) -> str:
    """One line of plain text, with control, format and bidi characters escaped.

    Lone surrogates, private-use and unassigned characters are escaped too. ``spaces=False`` also
    escapes spaces other than U+0020, which look alike in a quoted value.
    """
    return "".join(c if _is_printable(c, spaces) else ascii(c)[1:-1] for c in str(text))


def _is_printable(character: str, spaces: bool) -> bool:
    if character.isprintable() or character in JOINING_CHARACTERS:
        return True
    return spaces and unicodedata.category(character) == "Zs"


def print_lines(*lines: object, stderr: bool = False, end: str = "\n") -> None:
    """Print each argument as one line of plain text and flush the stream.

    Text of users, files and servers is printed here or on ``plain_console.get_console`` only, so
    that its escape sequences and line breaks do not reach the terminal.
    """
    text = "\n".join(map(printable, lines))
    print(text, end=end, file=sys.stderr if stderr else sys.stdout, flush=True)


def print_output(line: str) -> None:
    """Print a line of another process unchanged and flush stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show_cursor() -> None:
    """Show the terminal cursor, which a killed rank may have left hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


class ProgressLine:
    """Progress line on stderr, rewritten in place on a terminal."""

    def __init__(self, line: str) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._line = line
        print_lines(self._line, end="" if self._is_terminal else "\n", stderr=True)

    def show(self, text: str) -> None:
        """Show the progress on a terminal."""
        if self._is_terminal:
            sys.stderr.write("\r")
            print_lines(f"{self._line} {text}", end="", stderr=True)

    def close(self, text: str) -> None:
        """End the line on a terminal."""
        if self._is_terminal:
            print_lines(f" {text}", stderr=True)


def show_progress(items: Sequence[T], action: str, noun: str) -> Iterator[T]:
    """Yield the items and show progress if there are at least ``PROGRESS_MIN_ITEMS``."""
    if len(items) < PROGRESS_MIN_ITEMS:
        yield from items
        return
    progress = ProgressLine(f"{action} {len(items)} {noun} ...")
    for number, item in enumerate(items, start=1):
        progress.show(str(number))
        yield item
    progress.close("done")


class _LineHandler(logging.Handler):
    """Log handler that prints each message as one line: warnings on stderr, others on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        print_lines(record.getMessage(), stderr=record.levelno >= logging.WARNING)


@contextmanager
def print_log_messages() -> Iterator[None]:
    """Print the messages of scalewise's loggers as plain lines, and no second time by the root."""
    logger = logging.getLogger("scalewise")
    if any(isinstance(it, _LineHandler) for it in logger.handlers):
        yield
        return
    handler, level, propagates = _LineHandler(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def open_standard_streams() -> None:
    """Open closed standard streams on the null device.

    Otherwise the next file or socket to be opened gets their file descriptor.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


@contextmanager
def shield_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that drop text that cannot be written.

    Messages of scalewise's loggers are printed there.
    """
    originals = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_shield_stream(stream) for stream in originals)
    try:
        with print_log_messages():
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # unshielded, a failing flush at exit prints a warning
        sys.stdout, sys.stderr = originals


def adapt_log_setup() -> None:
    """Adapt a logging config: redact secrets in its log files, and print scalewise's messages.

    ``disable_existing_loggers`` disables each logger of scalewise.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "scalewise" and isinstance(logger, logging.Logger):
            logger.disabled = False
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setStream(_shield_stream(handler.stream or handler._open()))


def _shield_stream(stream: TextIO | None) -> Any:
    """Wrap a stream so that it never raises; None, a stream closed at startup, stays None."""
    return (
        stream if stream is None or isinstance(stream, _ShieldedStream) else _ShieldedStream(stream)
    )


class _ShieldedStream:
    """Text stream that drops characters instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # W&B replaces ``write`` to capture the console: it gets redacted text too.
        super().__setattr__(name, (lambda t: value(redact(t))) if name == "write" else value)

    def write(self, text: str) -> int:
        """Write the text with secrets redacted and unencodable characters replaced by ``?``."""
        try:
            self._stream.write(redact(text))
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._redirect_to_null()
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore a closed reader."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Redirect the stream to the null device, so that its buffer can be flushed at exit."""
        with suppress(OSError, ValueError):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self._stream.fileno())
            os.close(null_device)
