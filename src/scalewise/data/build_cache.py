"""Cache folders that are built once: each is complete or absent, even if a builder is killed."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from scalewise.atomic import disk_full_reason, sync_to_disk
from scalewise.errors import DataError
from scalewise.failures import exception_message


def cache_folder() -> Path:
    """Return the root folder of all caches; deleting it loses nothing but time.

    ``$SCALEWISE_CACHE``, else ``$XDG_CACHE_HOME/scalewise``, else ``~/.cache/scalewise``.
    """
    if folder := os.environ.get("SCALEWISE_CACHE"):
        return Path(folder)
    xdg_folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg_folder) if xdg_folder else Path.home() / ".cache") / "scalewise"


def build_cached(
    name: str,
    key: Mapping[str, object],
    build: Callable[[Path], None],
    subfolder: str = "data",
    *,
    resumable: bool = False,
) -> Path:
    """Return the folder ``NAME-DIGEST``, built by ``build(folder)`` if it does not exist.

    ``key`` is JSON and contains everything that decides the content. If several processes call this
    at the same time, one builds and the others wait. The folder appears by one rename after all its
    files are on disk, so that a killed builder leaves no partial content. If ``resumable``,
    ``build`` is called with the files that an interrupted call has left. Raises ``DataError`` if
    the cache cannot be written.
    """
    folder = _cache_path(name, key, subfolder)
    parent = folder.parent
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: a waiting process could otherwise lock a deleted file.
        with open(parent / f"{folder.name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build_folder(folder, build, resumable=resumable)
    except Exception as error:
        disk_full = disk_full_reason(error)
        if isinstance(error, OSError) and error.filename:
            detail = f"{error.strerror} ({error.filename})"
        elif disk_full is not None:
            detail = f"{disk_full[0]} ({folder})"
        elif isinstance(error, OSError):
            detail = exception_message(error)
        else:
            raise
        reason = f"the cache cannot be written: {detail}"
        fix = "set SCALEWISE_CACHE to a writable folder with free space"
        if disk_full is not None:
            fix = f"{disk_full[1]}, or {fix}"
        raise DataError.for_key("SCALEWISE_CACHE", cache_folder(), reason, fix) from error
    return folder


def is_cached(name: str, key: Mapping[str, object], subfolder: str = "data") -> bool:
    """Whether the folder of ``build_cached`` exists."""
    return _cache_path(name, key, subfolder).is_dir()


def _cache_path(name: str, key: Mapping[str, object], subfolder: str) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / subfolder / f"{name}-{digest}"


def _build_folder(folder: Path, build: Callable[[Path], None], *, resumable: bool) -> None:
    # The lock is held, so an existing partial folder belongs to a killed builder.
    partial_folder = folder.with_name(f".{folder.name}.partial")
    if not resumable:
        shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(exist_ok=resumable)
    try:
        build(partial_folder)
        for path in (*partial_folder.iterdir(), partial_folder):
            sync_to_disk(path)
        partial_folder.rename(folder)
    except BaseException as error:
        if not resumable or isinstance(error, Exception):
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    sync_to_disk(folder.parent)
