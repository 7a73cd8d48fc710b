"""Folders that a command makes, so that a command that is rejected takes away those alone."""

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
    """Returns the folder and its parents as far as they do not exist, the innermost first.

    ``new/../there`` exists where ``there`` does, though ``new`` would be made on the way.
    """
    path = folder.absolute()
    paths = (p for p in (path, *path.parents) if p.name != "..")
    return [p for p in paths if not os.path.exists(os.path.realpath(p))]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of the folders that exist and are empty, in their order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def record_hydra_folders(new_folders: list[Path]) -> Iterator[None]:
    """Adds to ``new_folders`` the folders that Hydra makes within the block, the innermost first.

    Raises ``ConfigError`` there for one that cannot be made.
    """
    kind: Any = type(Path())

    class Recorded(kind):  # type: ignore[misc]  # the class of this system's paths
        """A path that notes what it makes."""

        def mkdir(self, *args: Any, **kwargs: Any) -> None:
            absent = missing_folders(Path(self))
            try:
                super().mkdir(*args, **kwargs)
            except OSError as error:
                reason = f"cannot be made: {error.strerror}"
                fix = "give hydra.run.dir=DIR where you may write"
                raise ConfigError.for_key("hydra.run.dir", str(self), reason, fix) from None
            finally:
                new_folders.extend(absent)

    before, utils.Path = utils.Path, Recorded  # type: ignore[attr-defined]  # imported there
    try:
        yield
    finally:
        utils.Path = before  # type: ignore[attr-defined]  # imported there


@contextmanager
def before_each_run(callback: Callable[[DictConfig], None]) -> Iterator[None]:
    """Calls ``callback`` with the config of a single run, before Hydra makes the run's folder."""
    application: Any = hydra_application
    run_job = application.run_job

    def checked(**kwargs: Any) -> Any:
        callback(kwargs["config"])
        return run_job(**kwargs)

    application.run_job = checked  # Hydra has no hook of its own there
    try:
        yield
    finally:
        application.run_job = run_job
