"""The LightningModule: one model, one objective, one optimizer, whatever the layout."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from scalewise.data.loader import Batch
from scalewise.run import Run


class TrainingModule(LightningModule):
    """What Lightning trains. The last micro batch's loss stays on the device, unlogged."""

    def __init__(self, run: Run, steps: int) -> None:
        """Builds the model from the run's seed; ``steps`` is the length of the schedule."""
        super().__init__()
        self.run, self.steps = run, steps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            self.model = run.model.build()
        self.last_loss = torch.zeros(())
        self.last_grad_norm = torch.zeros(())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the mean loss of one micro batch, a scalar."""
        loss = self._loss(batch)
        self.last_loss = loss.detach()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to ``val/loss``, the mean over all held-out rows of all ranks."""
        loss = self._loss(batch)
        self.log("val/loss", loss, on_epoch=True, sync_dist=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the run's optimizer, and its schedule stepped once per optimizer step."""
        optimizer = self.run.optimizer.build(self.model.parameters())
        schedule = self.run.schedule.build(optimizer, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the whole gradient to the run's norm, and keeps the norm it had before."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.run.trainer.clip_norm is not None:
            limit = self.run.trainer.clip_norm
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm)
        self.last_grad_norm = norm.detach()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seeds dropout by (seed, micro step, rank), so that a resumed run draws alike."""
        if self.draws_at_random:
            mixed = (self.run.seed * 1_000_003 + batch_idx) * 1_000_003 + self.global_rank
            torch.manual_seed(mixed % 2**63)

    @property
    def draws_at_random(self) -> bool:
        """Returns whether the forward pass draws random numbers."""
        return bool(getattr(self.run.model, "dropout", 0.0))

    def _loss(self, batch: Batch) -> Tensor:
        return self.run.objective.loss(self.model(batch["inputs"]), batch["labels"])
