"""Bookkeeping of created folders, so that a rejected command removes only its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scalewise.compat.hydra import replaced_path_class
from scalewise.errors import ConfigError


def missing_folders(folder: Path) -> list[Path]:
    """List the folder and its parents that do not exist, innermost first.

    ``new/../existing`` counts as existing, although ``mkdir`` creates ``new``.
    """
    path = folder.absolute()
    paths = (p for p in (path, *path.parents) if p.name != "..")
    return [p for p in paths if not os.path.exists(os.path.realpath(p))]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that exist and are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def record_hydra_folders(new_folders: list[Path]) -> Iterator[None]:
    """Add the folders that Hydra creates within the block to ``new_folders``, innermost first.

    A folder that cannot be created raises ``ConfigError``.
    """
    path_class: Any = type(Path())

    class RecordingPath(path_class):  # type: ignore[misc]  # the path class of this platform
        """Path that records the folders it creates."""

        def mkdir(self, *args: Any, **kwargs: Any) -> None:
            missing = missing_folders(Path(self))
            try:
                super().mkdir(*args, **kwargs)
            except OSError as error:
                reason = f"cannot be created: {error.strerror}"
                fix = "set hydra.run.dir=DIR to a writable folder"
                raise ConfigError.for_key("hydra.run.dir", str(self), reason, fix) from None
            finally:
                new_folders.extend(missing)

    with replaced_path_class(RecordingPath):
        yield
