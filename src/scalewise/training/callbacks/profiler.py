"""A torch profiler trace of a few steps, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from scalewise.measure.profiled import silence_profiler
from scalewise.training.callbacks.callback_args import ProfilerArgs


class Profiler(ProfilerArgs, Callback):
    """Writes ``trace-rankR.json`` into the run's folder.

    ``wait`` micro batches pass first, then ``active`` ones are recorded.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_batches = 0
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to record when the wait is over."""
        if self._num_batches == self.wait:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            silence_profiler()
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Writes the trace when enough is recorded."""
        self._num_batches += 1
        if self._profile is not None and self._num_batches == self.wait + self.active:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes what a short run recorded."""
        if self._profile is not None:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        assert self._profile is not None
        self._profile.stop()
        folder = Path(trainer.default_root_dir)
        self._profile.export_chrome_trace(str(folder / f"trace-rank{trainer.global_rank}.json"))
        self._profile = None
