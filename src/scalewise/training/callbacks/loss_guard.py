"""Stop of a run whose loss is NaN, infinite or diverging."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from scalewise.callback_config import LossGuardArgs
from scalewise.step_counts import StepCounts
from scalewise.training.lightning_module import TrainingModule
from scalewise.training.step_statistics import SpikeDetector, TrainingDiverged


class _HostLosses:
    """Losses that are being copied to the host."""

    def __init__(self, steps: list[int], losses: torch.Tensor) -> None:
        self._steps = steps
        self._losses = losses.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if losses.is_cuda else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> Iterator[tuple[int, float]]:
        """Yield step and loss of each micro-batch, once the copy has ended."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        yield from zip(self._steps, self._losses.tolist(), strict=True)


def _count_skipped(module: LightningModule) -> int:
    """Number of optimizer steps that ``trainer.skip_sigma`` has skipped so far."""
    spikes: SpikeDetector | None = getattr(module, "spikes", None)
    return spikes.num_skipped if spikes is not None else 0


class LossGuard(LossGuardArgs, Callback):
    """Check the loss of every micro-batch, except those of steps that ``trainer.skip_sigma`` skips.

    Checks run every ``every`` micro-batches, and before each checkpoint. On CUDA, a check reads the
    losses whose copy to the host began at the previous one, so that the host does not wait.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pending: list[torch.Tensor] = []
        self._pending_steps: list[int] = []
        self._copied: _HostLosses | None = None
        self._mean: float | None = None
        self._num_spikes = 0
        self._num_skipped = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the skipped steps of the checkpoint."""
        self._num_skipped = _count_skipped(pl_module)

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
        losses = pl_module.last_losses if isinstance(pl_module, TrainingModule) else outputs["loss"]
        self._pending.append(losses)
        per_step = (
            pl_module.run.micro_batches_per_step
            if isinstance(pl_module, TrainingModule)
            else StepCounts(trainer.accumulate_grad_batches)
        )
        self._pending_steps.append(per_step.locate(batch_idx)[0] + 1)
        if getattr(pl_module, "spikes", None) is not None:
            if not per_step.is_step_end(batch_idx + 1):
                return  # the end of the step decides whether it is skipped
            self._drop_skipped_step(pl_module)
        if len(self._pending) >= self.every:
            self._check_copied()
            self._start_copy()
            if not losses.is_cuda:
                self._check_copied()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check the losses before weights affected by NaN are saved."""
        self._check_all()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the remaining losses."""
        self._check_all()

    def _drop_skipped_step(self, module: LightningModule) -> None:
        """Drop the losses of the last step if ``trainer.skip_sigma`` has skipped it."""
        num_skipped = _count_skipped(module)
        if num_skipped > self._num_skipped:
            num_kept = self._pending_steps.index(self._pending_steps[-1])
            del self._pending[num_kept:], self._pending_steps[num_kept:]
        self._num_skipped = num_skipped

    def _check_all(self) -> None:
        """Check all losses so far; on CUDA, the host waits."""
        self._check_copied()
        self._start_copy()
        self._check_copied()

    def _start_copy(self) -> None:
        """Start to copy the stored losses to the host."""
        if self._pending:
            losses = torch.stack(self._pending).view(len(self._pending), -1)
            self._copied = _HostLosses(self._pending_steps, losses[:, 0])
            self._pending, self._pending_steps = [], []

    def _check_copied(self) -> None:
        """Check the losses of the last copy."""
        if self._copied is not None:
            copied, self._copied = self._copied, None
            for step, loss in copied.wait():
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
