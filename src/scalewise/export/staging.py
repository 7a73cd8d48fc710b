"""Folders that appear whole at their final name, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scalewise.errors import ConfigError


@contextmanager
def staging_folder(target_folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of ``target_folder`` that takes its name by one rename at the end.

    What an export that was killed has left there is removed. The sibling is locked meanwhile.
    Symbolic links at either name are not followed.

    Raises:
        ConfigError: ``target_folder`` is there and not an empty folder, cannot be made, or is being
        written.
    """
    check_target_free(target_folder)
    partial = target_folder.with_name(f".partial-{target_folder.name}")
    try:
        if partial.is_symlink():
            partial.unlink()
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        reason, fix = f"cannot be made: {error.strerror}", "give to=FOLDER where you may write"
        raise ConfigError.for_key("to", str(target_folder), reason, fix) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        reason, fix = "is being written by another export", "wait for it, or give to=FOLDER"
        raise ConfigError.for_key("to", str(target_folder), reason, fix) from None
    try:
        _is_empty(partial)
        yield partial
        _sync_files(partial)
        check_target_free(target_folder)
        partial.rename(target_folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def check_target_free(target_folder: Path) -> None:
    """Raises ``ConfigError`` where something other than an empty folder has the name
    ``target_folder``."""
    if target_folder.is_symlink() or (
        target_folder.exists() and (not target_folder.is_dir() or any(target_folder.iterdir()))
    ):
        raise ConfigError.for_key(
            "to", str(target_folder), "is there already", "give to=FOLDER, a new one"
        )


def _is_empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _sync_files(folder: Path) -> None:
    """Waits until all files are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
