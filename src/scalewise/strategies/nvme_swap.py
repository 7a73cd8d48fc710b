"""Temporary NVMe folder of a rank, removed when its process ends."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

from scalewise.data.build_cache import cache_folder
from scalewise.errors import ConfigError

LOCK_FILE = "in-use"


class SwapFolder:
    """Folder that ``open`` creates and ``close`` removes.

    The folder of a killed rank is removed by the next call of ``open``.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = Path(parent) if parent else cache_folder() / "nvme"
        self._folder: Path | None = None
        self._lock: IO[str] | None = None

    def open(self) -> Path:
        """Create the folder and return its path; raises ``ConfigError`` if it cannot be written."""
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            for folder in self._parent.glob("rank-*"):
                _remove_unless_used(folder)
            self._folder = Path(tempfile.mkdtemp(prefix="rank-", dir=self._parent))
            self._lock = (self._folder / LOCK_FILE).open("w")
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError.for_key("parallelism.nvme_path", self._parent, reason) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._folder

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()


def _remove_unless_used(folder: Path) -> None:
    """Remove a folder unless a running process has locked it."""
    try:
        with (folder / LOCK_FILE).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # locked, or without a lock file yet
