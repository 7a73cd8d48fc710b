"""A folder that is built once: complete or absent, whoever starts, however the builder ends."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from scalewise.atomic import disk_full_reason
from scalewise.errors import DataError
from scalewise.failures import exception_message


def cache_folder() -> Path:
    """Returns the folder of everything that can be made again.

    ``$SCALEWISE_CACHE``, else ``$XDG_CACHE_HOME/scalewise``, else ``~/.cache/scalewise``.
    """
    if own := os.environ.get("SCALEWISE_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "scalewise"


def build_cached(
    name: str, key: Mapping[str, object], build: Callable[[Path], None], subfolder: str = "data"
) -> Path:
    """Returns the folder ``NAME-DIGEST`` that ``build(folder)`` filled, now or earlier.

    ``key`` is JSON and holds everything that decides the content. Of several processes one
    builds and the others wait for it. The folder appears by one rename after all its files are
    on disk, so a builder that is killed leaves nothing that is ever read. Raises ``DataError``
    where the cache cannot be written.
    """
    folder = _cache_path(name, key, subfolder)
    parent = folder.parent
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let a waiter hold the lock of a deleted file.
        with open(parent / f"{folder.name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build_folder(folder, build)
    except Exception as error:
        lacking = disk_full_reason(error)
        if isinstance(error, OSError) and error.filename:
            said = f"{error.strerror} ({error.filename})"
        elif lacking is not None:
            said = f"{lacking[0]} ({folder})"
        elif isinstance(error, OSError):
            said = exception_message(error)
        else:
            raise
        reason = f"the cache cannot be written: {said}"
        fix = "point SCALEWISE_CACHE to a writable folder with space"
        if lacking is not None:
            fix = f"{lacking[1]}, or {fix}"
        raise DataError.for_key("SCALEWISE_CACHE", cache_folder(), reason, fix) from error
    return folder


def is_cached(name: str, key: Mapping[str, object], subfolder: str = "data") -> bool:
    """Returns whether ``cached`` would find its folder complete."""
    return _cache_path(name, key, subfolder).is_dir()


def _cache_path(name: str, key: Mapping[str, object], subfolder: str) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / subfolder / f"{name}-{digest}"


def _build_folder(folder: Path, build: Callable[[Path], None]) -> None:
    # Under the lock nobody else builds: what lies here is of a builder that was killed.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for path in (*partial.iterdir(), partial):
            _flush(path)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
