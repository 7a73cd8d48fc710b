"""Export of trained models and adapters in the formats of Hugging Face, to an atomic folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from scalewise.atomic import disk_full_reason
from scalewise.errors import ConfigError
from scalewise.path_lock import PathLock


class AdapterExport(StrEnum):
    """Export of an adapter."""

    merged = "merged"
    """Merged into the weights of the model."""
    alone = "alone"
    """Separately, as a PEFT folder."""


@contextmanager
def staging_folder(target_folder: Path) -> Iterator[Path]:
    """Yield an empty, locked folder next to ``target_folder``; rename it to that at the end.

    Leftovers of a killed export are removed. Symbolic links at both paths are not followed.

    Raises:
        ConfigError: ``target_folder`` exists and is not an empty folder, cannot be created, or is
            being written by another process; or the disk is full.
    """
    check_target_free(target_folder)
    partial = target_folder.with_name(f".partial-{target_folder.name}")
    in_use = ConfigError.for_key(
        "to",
        str(target_folder),
        "is being written by another export",
        "wait for it, or set another to=FOLDER",
    )
    try:
        if partial.is_symlink():
            partial.unlink()
        partial.mkdir(parents=True, exist_ok=True)
        lock = PathLock(partial)
    except BlockingIOError:
        raise in_use from None
    except OSError as error:
        reason, fix = f"cannot be created: {error.strerror}", "set to=FOLDER to a writable path"
        raise ConfigError.for_key("to", str(target_folder), reason, fix) from None
    if not lock.is_current:  # the other export has renamed it
        raise in_use
    try:
        _clear(partial)
        yield partial
        _sync_files(partial)
        check_target_free(target_folder)
        partial.rename(target_folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if (reason_and_fix := disk_full_reason(error)) is None:
            raise
        raise ConfigError.for_key("to", str(target_folder), *reason_and_fix) from error
    finally:
        lock.release()


def check_target_free(target_folder: Path) -> None:
    """Raise ``ConfigError`` if ``target_folder`` exists and is not an empty folder."""
    if target_folder.is_symlink() or (
        target_folder.exists() and (not target_folder.is_dir() or any(target_folder.iterdir()))
    ):
        raise ConfigError.for_key(
            "to", str(target_folder), "already exists", "set to=FOLDER to a new folder"
        )


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync_files(folder: Path) -> None:
    """Flush all files to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
