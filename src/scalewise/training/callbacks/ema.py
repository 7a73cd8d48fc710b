"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from scalewise.callback_config import EMAArgs
from scalewise.checkpoints import store
from scalewise.errors import CheckpointError
from scalewise.models.init import local_tensor
from scalewise.training.callbacks.metrics_recorder import trainer_strategy


class EMAWeightAveraging(EMAArgs, Callback):
    """Average the trained weights after optimizer steps; each rank averages its own shards.

    With DeepSpeed, these are the rank's partitions of the master weights.

    As in ``torch.optim.swa_utils.AveragedModel``, the first update copies the weights; later
    updates compute ``decay * average + (1 - decay) * weights``. The average is stored in fp32. It
    replaces the weights during validation. A checkpoint stores it as ``average`` and the trained
    weights as ``model``; a resumed run trains the latter.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: dict[str, Tensor] = {}
        """This rank's shards of the averaged weights; tied weights have several names."""
        self._average: dict[str, Tensor] = {}
        """Averages by name; empty before the first update."""
        self._raw_weights: list[Tensor] = []
        """Copy of the trained weights while the average is validated."""
        self._last_step = 0
        """Number of optimizer steps seen."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the weights; they are sharded now, and not yet gathered by a forward pass."""
        self._weights = trainer_strategy(trainer).trained_shards()
        if self.use_buffers:
            self._weights |= {
                name: tensor
                for name, tensor in pl_module.state_dict(keep_vars=True).items()
                if not isinstance(tensor, nn.Parameter)
                and isinstance(tensor, Tensor)
                and tensor.is_floating_point()
            }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the step of the checkpoint."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Update the average after the last micro-batch of an optimizer step."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        index = step - 1
        if index >= self.update_starting_at_step and index % self.update_every_n_steps == 0:
            self._update_average()

    @property
    def average_tensors(self) -> list[Tensor]:
        """Averages on this rank."""
        return list(self._average.values())

    @torch.no_grad()
    def _update_average(self) -> None:
        if not self._average:
            self._average = self._allocate_average()
            for weight, average in self._iter_pairs():
                average.copy_(weight)
            return
        for weight, average in self._iter_pairs():
            if weight.dtype is average.dtype:
                average.lerp_(weight, 1 - self.decay)
            else:  # without an fp32 copy of the weight, which CUDA kernels convert by element
                average.mul_(self.decay).add_(weight, alpha=1 - self.decay)

    def _allocate_average(self) -> dict[str, Tensor]:
        """Uninitialized averages; the names of a tied weight share one tensor."""
        averages: dict[int, Tensor] = {}
        for tensor in self._weights.values():
            if id(tensor) not in averages:
                averages[id(tensor)] = torch.empty_like(tensor.detach(), dtype=torch.float32)
        return {name: averages[id(tensor)] for name, tensor in self._weights.items()}

    def _iter_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Local shards of each distinct weight and of its average."""
        seen: set[int] = set()
        for name, tensor in self._weights.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (
                    local_tensor(tensor.detach()),
                    local_tensor(self._average[name]),
                )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the weights by the average."""
        if not self._average:
            return
        pairs = list(self._iter_pairs())
        self._raw_weights = [weight.clone() for weight, _ in pairs]
        for weight, average in pairs:
            weight.copy_(average)
        trainer_strategy(trainer).update_forward_weights()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trained weights."""
        if not self._raw_weights:
            return
        for (weight, _), raw in zip(self._iter_pairs(), self._raw_weights, strict=True):
            weight.copy_(raw)
        self._raw_weights = []
        trainer_strategy(trainer).update_forward_weights()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the average to the checkpoint."""
        if self._average:
            checkpoint[store.AVERAGE] = trainer_strategy(trainer).averages_by_name(self._average)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the average, if the checkpoint has one."""
        path = trainer_strategy(trainer).resume_path
        if "averaging_state" in checkpoint:  # Lightning's WeightAveraging saves it as the model
            reason = "contains averaged weights instead of the trained weights"
            raise CheckpointError.for_key("resume", path, reason, "set resume=null")
        if store.has_tensors(path, store.AVERAGE):
            self._average = self._allocate_average()
            trainer_strategy(trainer).load_averages(self._average)
