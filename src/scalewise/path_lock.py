"""Advisory locks on files and folders that leave no lock file."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

UNLOCKED = -1
"""Descriptor of a lock that is released."""


class PathLock:
    """``flock`` of a file or folder, until the block ends, ``release``, or the object is deleted.

    Has no effect on a file system without locks.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = False) -> None:
        """Lock ``path``.

        Args:
            path: File or folder.
            shared: Whether other processes may have shared locks at the same time.
            wait: Whether to wait for other processes.

        Raises:
            BlockingIOError: another process has a lock, and ``wait`` is false.
            OSError: ``path`` cannot be opened.
        """
        self.path, self._descriptor = path, UNLOCKED
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, mode if wait else mode | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            pass

    @property
    def is_current(self) -> bool:
        """Whether the locked file is still at its path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, UNLOCKED
        if descriptor != UNLOCKED:
            with suppress(OSError):
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
