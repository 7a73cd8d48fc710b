"""Reading files that anybody may have put into a folder: a FIFO there would block for ever."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from scalewise.errors import ConfigError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class IrregularFileError(ConfigError):
    """A FIFO, a socket, a device or a folder in the place of a file."""


def open_binary(path: Path) -> BufferedReader:
    """Opens a regular file for reading, without waiting for another process.

    Raises ``IrregularFileError`` for any other kind of file, and ``OSError`` as ``open`` does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            check_regular(path)
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular_reason(path, mode)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """Returns the content of a regular file; raises what :func:`open_binary` raises."""
    with open_binary(path) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a regular file in UTF-8; raises what :func:`open_binary` raises."""
    return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n")


def check_regular(path: Path) -> None:
    """Raises ``IrregularFileError`` for what exists and is no regular file, without opening it."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise _irregular_reason(path, mode)


def _irregular_reason(path: Path, mode: int) -> IrregularFileError:
    kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
    reason = f"{path} is {kind}, not a regular file"
    return IrregularFileError.for_key("", "", reason, "remove it, or put a copy of the file back")
