"""Trace of a few steps by ``torch.profiler``, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from scalewise.callback_config import ProfilerArgs
from scalewise.measure.allocated_bytes import silence_profiler


class Profiler(ProfilerArgs, Callback):
    """Profile ``active`` micro-batches after ``wait`` others; write ``trace-rankR.json``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_batches = 0
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the profiler after ``wait`` micro-batches."""
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
        """Write the trace after ``active`` recorded micro-batches."""
        self._num_batches += 1
        if self._profile is not None and self._num_batches == self.wait + self.active:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the trace of a run that ends early."""
        if self._profile is not None:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        assert self._profile is not None
        self._profile.stop()
        folder = Path(trainer.default_root_dir)
        self._profile.export_chrome_trace(str(folder / f"trace-rank{trainer.global_rank}.json"))
        self._profile = None
