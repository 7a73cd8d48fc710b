"""Files that are written whole or not at all, also on a full disk."""

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
"""Errors of a file that found no space: of the disk, of a quota, of the limit on a file's size."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust name an error of the system, in exceptions of kinds of their own."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_atomic(path: Path, content: bytes) -> None:
    """Writes ``content`` so that a reader sees the old file or the new one, never a part.

    Follows no link at ``path``. On a full disk it uses the space that ``reserve`` took, if any.
    """
    with name_file_in_errors(path):
        try:
            _write_new(path, content)
        except OSError as error:
            if error.errno not in DISK_FULL or not _write_reserved(path, content):
                raise


def copy_atomic(source: Path, path: Path) -> None:
    """Copies the content of ``source`` as ``write`` writes it."""
    with (
        name_file_in_errors(path),
        regular_files.open_binary(source) as content,
        _PartialFile(path) as file,
    ):
        shutil.copyfileobj(content, file)


def disk_full_reason(error: BaseException) -> tuple[str, str] | None:
    """Returns why a file found no space, and the fix; None for any other exception."""
    told = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else told and int(told[1])
    if number not in DISK_FULL:
        return None
    if number == errno.EFBIG:
        return "a file may not grow so large", "raise the limit of the shell, ulimit -f"
    return "the disk is full", "free some space, or run in another folder"


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Adds the file to errors of the block that name none, as those of a descriptor do."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def reserve_space(path: Path, size: int) -> None:
    """Takes ``size`` bytes of disk for writing ``path`` on a full disk.

    Raises ``OSError`` and takes nothing where they are not free.
    """
    # Random bytes: a file system that compresses would take no space for zeros.
    with name_file_in_errors(path):
        _write_new(_reserve_path(path), os.urandom(size))


def release_space(path: Path) -> None:
    """Frees the space reserved for ``path``."""
    with suppress(OSError):
        _reserve_path(path).unlink()


def _reserve_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


class _PartialFile:
    """A new file next to ``path`` that takes its name when the block ends without an exception."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._file = os.fdopen(os.open(self._partial, _NEW, 0o666), "wb")

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
    """Writes over the reserved blocks, renames them to ``path`` and reserves what that freed.

    Returns False, and keeps the old file, where nothing was reserved or ``content`` is larger.
    """
    reserved = _reserve_path(path)
    try:
        descriptor = os.open(reserved, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
    reserved.replace(path)
    for part in range(8, 0, -1):
        with suppress(OSError):
            reserve_space(path, size * part // 8)
            break
    return True
