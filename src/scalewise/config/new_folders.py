"""Bookkeeping of created folders, so that a rejected command removes only its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra._internal import hydra as hydra_application
from hydra.core import utils
from omegaconf import DictConfig

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

    original, utils.Path = utils.Path, RecordingPath  # type: ignore[attr-defined]  # imported there
    try:
        yield
    finally:
        utils.Path = original  # type: ignore[attr-defined]  # imported there


@contextmanager
def before_each_run(callback: Callable[[DictConfig], None]) -> Iterator[None]:
    """Call ``callback`` with the config of a single run, before Hydra creates the run folder."""
    application: Any = hydra_application
    run_job = application.run_job

    def checked(**kwargs: Any) -> Any:
        callback(kwargs["config"])
        return run_job(**kwargs)

    application.run_job = checked  # Hydra has no hook at this point
    try:
        yield
    finally:
        application.run_job = run_job
