"""Advisory locks on run and sweep folders: one process at a time drives each of them.

The lock is ``flock`` on a file in the folder, so that the kernel releases it when its process
dies. NFS passes it on to the server, which makes it hold between machines. A file system without
``flock`` leaves the folder unlocked; callers then rely on the process that a record names.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from scalewise.tracking.run_files import read_json

FILE = ".lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""What ``flock`` fails with on a file system that has no locks."""
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
PATIENCE = 0.5
"""Seconds to wait for another process that only looks whether a lock is held."""

_descriptors: set[int] = set()


def process_identity() -> dict[str, object]:
    """Returns what tells this process from all others: ``pid``, ``started`` and ``host``."""
    own = psutil.Process()
    return {"pid": own.pid, "started": own.create_time(), "host": socket.gethostname()}


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock, as the lock file names it."""

    pid: str
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def kill_command(self) -> str:
        """Returns how to end the process, as a shell takes it."""
        kill = f"kill {self.pid}"
        return kill if self.host == socket.gethostname() else f"ssh {self.host} {kill}"


class InUseError(Exception):
    """Another process holds the lock of a folder."""

    def __init__(self, folder: Path, owner: LockOwner) -> None:
        super().__init__(f"{folder} is in use by {owner}")
        self.owner = owner


class FolderLock:
    """A lock that this process holds, until ``release`` or its end."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        """``descriptor``: of the locked file; None: the file system has no locks."""
        self.folder, self._descriptor = folder, descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        """Returns whether the lock excludes other processes."""
        return self._descriptor is not None

    def release(self) -> None:
        """Releases the lock and removes its file."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # removed while it is locked: see _is_current
            (self.folder / FILE).unlink()
        _descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None


def acquire_lock(folder: Path) -> FolderLock:
    """Locks a folder for this process; raises ``InUseError`` if another process holds the lock.

    The lock is not ``is_held`` where the folder is read-only or its file system has no locks.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            return FolderLock(folder, None)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                return FolderLock(folder, None)
            if time.monotonic() > deadline:
                raise InUseError(folder, _parse_owner(folder)) from None
            time.sleep(PATIENCE / 10)
            continue
        if _is_current_file(folder, descriptor):
            break
        os.close(descriptor)
    _descriptors.add(descriptor)
    with suppress(OSError):  # a full disk costs the name of the owner, not the lock
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(process_identity()).encode())
    return FolderLock(folder, descriptor)


def lock_owner(folder: Path) -> LockOwner | None:
    """Returns the process that holds the lock of a folder; None if it is free or has no locks."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse_owner(folder)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _is_current_file(folder: Path, descriptor: int) -> bool:
    """Returns whether the locked file is still the one in the folder: its owner removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / FILE))
    except OSError:
        return False


def _parse_owner(folder: Path) -> LockOwner:
    content = read_json(folder / FILE)
    return LockOwner(str(content.get("pid", "?")), str(content.get("host", socket.gethostname())))


def _close_in_child() -> None:
    """Closes copies in a forked child, which would hold the lock beyond the end of its parent."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
