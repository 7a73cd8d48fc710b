"""Process of a rank during training: timeouts of collectives and garbage collection."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.compat.torch_distributed import set_group_timeouts
from scalewise.run_config import RunConfig


class RankProcess(Callback):
    """Set the timeout of all collectives, and collect garbage on all ranks in the same steps.

    An automatic collection examines all objects of torch, which takes several tenths of a second,
    and delays the other ranks, each at another step. Objects that exist after the first step are
    not examined again.
    """

    def __init__(self, run: RunConfig) -> None:
        self._launch, self._micro_batches_per_step = run.launch, run.micro_batches_per_step
        self._is_frozen = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the timeout of all collectives, and disable automatic garbage collection."""
        if dist.is_initialized():
            set_group_timeouts(timedelta(seconds=self._launch.collective_timeout))
        if self._launch.gc_every is not None:
            gc.disable()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Collect garbage after the first step, and every ``launch.gc_every`` steps."""
        every = self._launch.gc_every
        if every is None or not self._micro_batches_per_step.is_step_end(batch_idx + 1):
            return
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True
        elif trainer.global_step % every == 0:
            gc.collect()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect automatically during validation, which has no steps."""
        if self._launch.gc_every is not None:
            gc.enable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Disable automatic garbage collection again."""
        if self._launch.gc_every is not None and not trainer.sanity_checking:
            gc.disable()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect automatically again."""
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Collect automatically again."""
        self._restore()

    def _restore(self) -> None:
        if self._launch.gc_every is not None:
            gc.unfreeze()
            gc.enable()
