"""Where a user's loader is in its rows: a resumed run goes on where the checkpoint was taken."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

STATE = "position"
"""The entry of a checkpoint that tells it."""


class DataLoaderState(Callback):
    """Keeps the state of torch's generator, of which a loader draws its order as an epoch begins.

    Lightning would begin the epoch's rows anew, and of several ranks seed the generator once more.
    """

    def __init__(self) -> None:
        self._initial_rng_state = torch.get_rng_state()
        self._epoch_rng_state: Tensor | None = None
        self._resume_rng_state: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Has every layout go on from where building the module has left the generator."""
        torch.set_rng_state(self._initial_rng_state)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what the rows of a later epoch are drawn from; of the first, the seed gives it."""
        if trainer.current_epoch > 0:
            self._epoch_rng_state = torch.get_rng_state()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the generator as it was when the epoch began, and as it is."""
        checkpoint[STATE] = {"began": self._epoch_rng_state, "then": torch.get_rng_state()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Reads them."""
        self._epoch_rng_state, self._resume_rng_state = (
            checkpoint[STATE]["began"],
            checkpoint[STATE]["then"],
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Passes over the batches that were read before, in the order of their epoch."""
        if self._resume_rng_state is None:
            return
        loop = trainer.fit_loop
        fetcher, done = loop._data_fetcher, loop.epoch_loop.batch_progress.current.ready
        assert fetcher is not None
        if done >= loop.max_batches:  # the epoch had ended
            self._epoch_rng_state, done = self._resume_rng_state, 0
        if self._epoch_rng_state is not None:
            torch.set_rng_state(self._epoch_rng_state)
            iter(fetcher)
        for _ in range(done):
            next(fetcher)
        fetcher.fetched -= done  # Lightning adds them
        torch.set_rng_state(self._resume_rng_state)
