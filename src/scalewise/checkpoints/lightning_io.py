"""Lets Lightning's Trainer save to and load from the suite's checkpoint folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

from scalewise.checkpoints import store


class FolderIO(CheckpointIO):
    """The seam between ``trainer.save_checkpoint`` and ``store``."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder."""
        store.save(Path(path), checkpoint)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns a checkpoint folder's content; objects are never unpickled."""
        return store.load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Is never asked: the suite prunes its own folders."""
        raise AssertionError(path)
