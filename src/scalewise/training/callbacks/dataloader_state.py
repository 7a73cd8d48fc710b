"""Position of a user-defined data loader, so that a resumed run reads the remaining samples."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from scalewise.compat.lightning import data_fetcher

STATE = "position"
"""Key of the state in a checkpoint."""


class DataLoaderState(Callback):
    """Save and restore the position of the training loader and torch's random state.

    A loader shuffles with torch's default generator when an epoch starts. Lightning would restart
    the epoch from its first sample and, with several ranks, seed the generator again.
    """

    def __init__(self) -> None:
        self._initial_rng_state = torch.get_rng_state()
        self._epoch_rng_state: Tensor | None = None
        self._resume_rng_state: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the random state after module construction, the same for every strategy."""
        torch.set_rng_state(self._initial_rng_state)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the random state at the start of an epoch; the seed gives that of the first."""
        if trainer.current_epoch > 0:
            self._epoch_rng_state = torch.get_rng_state()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the random state at the start of the epoch and the current one."""
        checkpoint[STATE] = {"began": self._epoch_rng_state, "then": torch.get_rng_state()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load both random states."""
        self._epoch_rng_state, self._resume_rng_state = (
            checkpoint[STATE]["began"],
            checkpoint[STATE]["then"],
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Skip the batches that were read before the checkpoint, in the order of their epoch."""
        if self._resume_rng_state is None:
            return
        loop = trainer.fit_loop
        fetcher, done = data_fetcher(trainer), loop.epoch_loop.batch_progress.current.ready
        assert fetcher is not None
        if done >= loop.max_batches:  # the checkpoint was saved at the end of an epoch
            self._epoch_rng_state, done = self._resume_rng_state, 0
        if self._epoch_rng_state is not None:
            torch.set_rng_state(self._epoch_rng_state)
            iter(fetcher)
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning adds them again
        torch.set_rng_state(self._resume_rng_state)
