"""Checkpoints during training: periodic, best, last, and at a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.checkpoints import manifest
from scalewise.errors import Interrupted
from scalewise.run_config import RunConfig
from scalewise.training.callbacks.metrics_recorder import (
    is_validation_next,
    trainer_strategy,
    validation_metrics,
)
from scalewise.training.signal_stop import STOP


class CheckpointSaver(Callback):
    """Save checkpoints after whole optimizer steps, and stop the run on a signal."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        self._run, self._folder = run, folder / "checkpoints"
        self._saved_step = 0
        self._best_loss: float | None = None
        self.seconds = 0.0
        """Time for which training has waited for checkpoints, in seconds."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Block signals before Lightning installs handlers, whose SIGTERM counts as success."""
        STOP.block_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers of scalewise again, and set up the checkpoint writer."""
        STOP.install()
        STOP.unblock_signals()
        trainer_strategy(trainer).setup_checkpoint_writer(self._run.checkpoint)
        best = manifest.best_checkpoint(self._folder)  # of an earlier attempt in this folder
        self._best_loss = best[1] if best else None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save the step if it is due, or if a signal has arrived.

        If a validation follows, the step is saved after it, together with its loss.
        """
        if not self._run.micro_batches_per_step.is_step_end(batch_idx + 1):
            return
        if number := STOP.poll():
            self.save(trainer)
            trainer_strategy(trainer).writer.finish()
            name, step = signal.Signals(number).name, trainer.global_step
            raise Interrupted(number, f"{name} after step {step}; its checkpoint is saved")
        if self._is_due(trainer) and not is_validation_next(trainer, self._run):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a step that is due, or whose validation loss is the lowest so far."""
        if trainer.sanity_checking:
            return
        loss = validation_metrics(trainer, self._run).get("val/loss", inf)
        is_best = self._run.checkpoint.best and loss < (
            inf if self._best_loss is None else self._best_loss
        )
        if is_best or self._is_due(trainer):
            self.save(trainer)
        if not is_best:
            return
        self._best_loss = loss
        self._run_after_saves(trainer, partial(self._mark_best, trainer.global_step, loss))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step and wait for the checkpoint writer."""
        STOP.close()
        if self._run.checkpoint.at_end:
            self.save(trainer)
        start = time.perf_counter()
        trainer_strategy(trainer).writer.finish()
        self.seconds += time.perf_counter() - start

    def _is_due(self, trainer: Trainer) -> bool:
        every = self._run.checkpoint.every
        return every is not None and trainer.global_step % every == 0

    def save(self, trainer: Trainer) -> None:
        """Save the current step, unless it is saved already."""
        step, start = trainer.global_step, time.perf_counter()
        if step == self._saved_step:
            return
        trainer.save_checkpoint(manifest.checkpoint_path(self._folder, step))
        self._saved_step = step
        self._run_after_saves(trainer, self._prune)
        self.seconds += time.perf_counter() - start

    def _run_after_saves(self, trainer: Trainer, task: Callable[[], None]) -> None:
        """Run ``task`` on rank 0 once all previous checkpoints are on disk."""
        if trainer.is_global_zero:
            trainer_strategy(trainer).writer.submit(task)

    def _mark_best(self, step: int, loss: float) -> None:
        manifest.mark_best(self._folder, step, loss)
        self._prune()

    def _prune(self) -> None:
        manifest.prune_checkpoints(self._folder, self._run.checkpoint.keep)
