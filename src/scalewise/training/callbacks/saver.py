"""Checkpoints while training: the latest, the best, the last, and the one a signal asks for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.checkpoints import store
from scalewise.errors import Interrupted
from scalewise.run import Run
from scalewise.training.stopping import STOP


class Saver(Callback):
    """Saves whole steps only, and ends the run when the ranks agree on a signal."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder / "checkpoints"
        self._saved = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals back from Lightning, whose SIGTERM ends as a success."""
        STOP.install()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Saves when a step ended and it is time, or time to go."""
        if (batch_idx + 1) % self._run.accumulation:
            return
        step, every = trainer.global_step, self._run.checkpoint.every
        if every is not None and step % every == 0:
            self.save(trainer)
        if number := STOP.agreed(pl_module.device):
            self.save(trainer)
            name = signal.Signals(number).name
            raise Interrupted(number, f"{name} after step {step}; its checkpoint is saved")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the step of the lowest held-out loss so far."""
        if not self._run.checkpoint.best:
            return
        loss = float(trainer.callback_metrics["val/loss"])
        best = store.best_of(self._folder)
        if best is not None and loss >= best[1]:
            return
        self.save(trainer)
        if trainer.is_global_zero:
            store.mark_best(self._folder, trainer.global_step, loss)
            store.prune(self._folder, self._run.checkpoint.keep)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step."""
        STOP.close()
        if self._run.checkpoint.at_end:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves the present step, once."""
        step = trainer.global_step
        if step == self._saved:
            return
        trainer.save_checkpoint(store.path_of(self._folder, step))
        self._saved = step
        if trainer.is_global_zero:
            store.prune(self._folder, self._run.checkpoint.keep)
