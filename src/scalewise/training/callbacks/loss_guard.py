"""Stop of a run whose loss is NaN, infinite or diverging."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.callback_config import LossGuardArgs
from scalewise.errors import ScalewiseError
from scalewise.training.lightning_module import TrainingModule


class TrainingDiverged(ScalewiseError):  # noqa: N818 (names the event, as torch's errors do)
    """The loss is NaN or infinite, or stays far above its running mean."""


class LossGuard(LossGuardArgs, Callback):
    """Check the loss of every micro-batch.

    Checks run every ``every`` micro-batches, to avoid a device synchronization for each, and
    before each checkpoint.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._mean: float | None = None
        self._num_spikes = 0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Store the loss, and check the stored losses once there are ``every``."""
        # Not outputs["loss"], which Lightning has divided by the accumulation.
        loss = pl_module.last_loss if isinstance(pl_module, TrainingModule) else outputs["loss"]
        step = batch_idx // trainer.accumulate_grad_batches + 1
        self._pending.append((step, loss.detach()))
        if len(self._pending) >= self.every:
            self._check_pending()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check the losses before weights affected by NaN are saved."""
        self._check_pending()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the remaining losses."""
        self._check_pending()

    def _check_pending(self) -> None:
        if not self._pending:
            return
        losses = torch.stack([loss for _, loss in self._pending]).tolist()
        steps = [step for step, _ in self._pending]
        self._pending = []
        for step, loss in zip(steps, losses, strict=True):
            self._check_loss(step, loss)

    def _check_loss(self, step: int, loss: float) -> None:
        fix = "lower optimizer.lr, lengthen schedule.warmup_steps or tighten trainer.clip_norm"
        if not isfinite(loss):
            raise TrainingDiverged(f"the loss is {loss} at step {step}; {fix}")
        if self._mean is not None and loss > max(self.factor * self._mean, self.floor):
            self._num_spikes += 1
            if self._num_spikes >= self.patience:
                raise TrainingDiverged(
                    f"the loss is {loss:.4g} at step {step}, {loss / self._mean:.1f} times its "
                    f"running mean, and a spike in {self._num_spikes} consecutive micro-batches; "
                    f"{fix}"
                )
            return
        self._num_spikes = 0
        self._mean = loss if self._mean is None else 0.9 * self._mean + 0.1 * loss
