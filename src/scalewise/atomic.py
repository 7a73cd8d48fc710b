"""Atomic file writes, with disk space reserved in advance for a full disk."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scalewise import regular_files

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a write without space: disk full, quota or file size limit."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Error number in the messages of Rust libraries, which raise their own exception types."""
_PARTIAL_WRITE = re.compile(r"\d+ requested and \d+ written")
"""Error message of NumPy, without error number, for an array that is written in part."""
_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` atomically: readers see the old file or the new one.

    Does not follow a symbolic link at ``path``. A full disk uses the space of ``reserve_space``.
    """
    with name_file_in_errors(path):
        try:
            _write_new(path, content)
        except OSError as error:
            if error.errno not in DISK_FULL or not _write_reserved(path, content):
                raise


def copy_atomic(source: Path, path: Path) -> None:
    """Copy the content of ``source`` to ``path`` atomically."""
    with (
        name_file_in_errors(path),
        regular_files.open_binary(source) as content,
        _PartialFile(path) as file,
    ):
        shutil.copyfileobj(content, file)


def sync_to_disk(path: Path) -> None:
    """Write a file, or the entries of a folder, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_full_reason(error: BaseException) -> tuple[str, str] | None:
    """Reason and fix of a write that failed for disk space; None for any other exception."""
    match = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else match and int(match[1])
    if isinstance(error, OSError) and _PARTIAL_WRITE.fullmatch(str(error)):
        number = errno.ENOSPC
    if number not in DISK_FULL:
        return None
    if number == errno.EFBIG:
        return "the file exceeds the file size limit", "raise the limit with ulimit -f"
    return "the disk is full", "free some space, or run in another folder"


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Set the file name of an ``OSError`` that has none, as errors of a descriptor do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def reserve_space(path: Path, size: int) -> None:
    """Reserve ``size`` bytes of disk for a later write of ``path``.

    Raises ``OSError`` and reserves nothing if they are not free.
    """
    # Random bytes: a compressing file system stores zeros in no space.
    with name_file_in_errors(path):
        _write_new(_reserve_path(path), os.urandom(size))


def release_space(path: Path) -> None:
    """Free the space reserved for ``path``."""
    with suppress(OSError):
        _reserve_path(path).unlink()


def _reserve_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


class _PartialFile:
    """Temporary file next to ``path`` that replaces it when the block ends without an exception."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._file = os.fdopen(os.open(self._partial, _OPEN_FLAGS, 0o666), "wb")

    def __enter__(self) -> BinaryIO:
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    with _PartialFile(path) as file:
        file.write(content)


def _write_reserved(path: Path, content: bytes) -> bool:
    """Overwrite the reserved file, rename it to ``path`` and reserve the remaining space again.

    Returns False, and keeps the old file, if nothing was reserved or ``content`` is larger.
    """
    reserved_file = _reserve_path(path)
    try:
        descriptor = os.open(reserved_file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        size = os.fstat(file.fileno()).st_size
        if len(content) > size:
            return False
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    reserved_file.replace(path)
    for eighths in range(8, 0, -1):
        with suppress(OSError):
            reserve_space(path, size * eighths // 8)
            break
    return True
