"""Opening of regular files in folders that other users write to, where a FIFO would block."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from scalewise.errors import ConfigError

_KIND_NAMES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class IrregularFileError(ConfigError):
    """A FIFO, socket, device or folder where a regular file is expected."""


def open_binary(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for another process.

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
        raise _irregular_error(path, mode)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raises the errors of :func:`open_binary`."""
    with open_binary(path) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the UTF-8 text of a regular file; raises the errors of :func:`open_binary`."""
    return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n")


def expand_home(path: str | Path) -> Path:
    """Return a path with the home folder for its ``~``; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def check_regular(path: Path) -> None:
    """Raise ``IrregularFileError`` if a path exists and is not a regular file; does not open it."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise _irregular_error(path, mode)


def _irregular_error(path: Path, mode: int) -> IrregularFileError:
    kind = _KIND_NAMES.get(stat.S_IFMT(mode), "of another kind")
    reason = f"{path} is {kind}, not a regular file"
    return IrregularFileError.for_key(
        "", "", reason, "remove it, or replace it by a copy of the file"
    )
