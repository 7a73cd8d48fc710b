"""Advisory locks on run and sweep folders: one process at a time uses each of them.

The lock is ``flock`` on a file in the folder, so that the kernel releases it when the process
ends. NFS forwards it to the server, which makes it valid between machines. A file system without
``flock`` leaves the folder unlocked; callers then rely on the process in the record.
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

from scalewise.run_files import read_json

FILE = ".lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""Error numbers of ``flock`` on a file system without locks."""
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
"""Error numbers of creating a lock file in a read-only folder."""
LOCK_WAIT_S = 0.5
"""Time to wait for a process that only tests whether a folder is locked, in seconds."""

_descriptors: set[int] = set()


def process_identity() -> dict[str, object]:
    """Unique identity of this process: ``pid``, ``started`` and ``host``."""
    process = psutil.Process()
    return {"pid": process.pid, "started": process.create_time(), "host": socket.gethostname()}


@dataclass(frozen=True)
class LockOwner:
    """Process that holds a lock, read from the lock file."""

    pid: str
    """Process ID."""
    host: str
    """Host name."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def kill_command(self) -> str:
        """Shell command that ends the process."""
        kill = f"kill {self.pid}"
        return kill if self.host == socket.gethostname() else f"ssh {self.host} {kill}"


class InUseError(Exception):
    """Another process holds the lock of a folder."""

    def __init__(self, folder: Path, owner: LockOwner) -> None:
        super().__init__(f"{folder} is in use by {owner}")
        self.owner = owner


class FolderLock:
    """Lock on a folder, held until ``release`` or the end of the process."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        """``descriptor``: descriptor of the locked file; None: the file system has no locks."""
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
        """Whether the lock excludes other processes."""
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # removed before the release: see _is_current_file
            (self.folder / FILE).unlink()
        _descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None


def acquire_lock(folder: Path) -> FolderLock:
    """Lock a folder for this process. Raises ``InUseError`` if another process holds the lock.

    The lock is not ``is_held`` if the folder is read-only or its file system has no locks.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
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
            time.sleep(LOCK_WAIT_S / 10)
            continue
        if _is_current_file(folder, descriptor):
            break
        os.close(descriptor)
    _descriptors.add(descriptor)
    with suppress(OSError):  # without disk space the lock has no owner record
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(process_identity()).encode())
    return FolderLock(folder, descriptor)


def lock_owner(folder: Path) -> LockOwner | None:
    """Process that holds the lock of a folder; None if it is free or has no locks."""
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
    """Whether the locked file is still in the folder, as a release removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / FILE))
    except OSError:
        return False


def _parse_owner(folder: Path) -> LockOwner:
    content = read_json(folder / FILE)
    return LockOwner(str(content.get("pid", "?")), str(content.get("host", socket.gethostname())))


def _close_in_child() -> None:
    """Close the descriptors in a forked child, which would hold the locks after its parent ends."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
