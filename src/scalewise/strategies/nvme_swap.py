"""A rank's own folder on a fast disk, gone when its process is."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

from scalewise.data.build_cache import cache_folder
from scalewise.errors import ConfigError

LOCK = "in-use"


class SwapFolder:
    """Made by ``open``, removed by ``close``; one that a killed rank left, by the next rank."""

    def __init__(self, parent: str | None) -> None:
        self._parent = Path(parent) if parent else cache_folder() / "nvme"
        self._folder: Path | None = None
        self._lock: IO[str] | None = None

    def open(self) -> Path:
        """Returns a new folder; raises ``ConfigError`` where none can be made."""
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            for left in self._parent.glob("rank-*"):
                _remove_unless_used(left)
            self._folder = Path(tempfile.mkdtemp(prefix="rank-", dir=self._parent))
            self._lock = (self._folder / LOCK).open("w")
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError.for_key("parallelism.nvme_path", self._parent, reason) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._folder

    def close(self) -> None:
        """Removes the folder."""
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()


def _remove_unless_used(folder: Path) -> None:
    """Removes a folder whose owner, and with it the owner's lock, is gone."""
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or just being made
