"""Exponential moving average (EMA) of the weights, kept next to the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from scalewise.checkpoints import store
from scalewise.errors import CheckpointError
from scalewise.strategies import grad_norm
from scalewise.training.callbacks.callback_args import EMAArgs
from scalewise.training.callbacks.metrics_recorder import trainer_strategy


class EMAWeightAveraging(EMAArgs, Callback):
    """Averages trained weights after optimizer steps; every rank averages the shards it holds.

    As in ``torch.optim.swa_utils.AveragedModel``, the first update copies the weights and the
    average of step ``t`` is ``decay * average + (1 - decay) * weights``. The average is fp32. It
    replaces the weights while they are validated, and is saved as ``average`` in checkpoints; their
    ``model`` holds the weights themselves, from which a resumed run trains.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: dict[str, Tensor] = {}
        """What is averaged, by its name in this rank's module; tied weights have several names."""
        self._average: dict[str, Tensor] = {}
        """Empty before the first update."""
        self._raw_weights: list[Tensor] = []
        """The weights themselves while the average is validated."""
        self._last_step = 0
        """Optimizer steps at the last update."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks the weights up: by now they are sharded, and no forward pass has gathered them."""
        self._weights = {
            name: tensor
            for name, tensor in pl_module.state_dict(keep_vars=True).items()
            if self._is_averaged(tensor)
        }

    def _is_averaged(self, tensor: object) -> bool:
        if isinstance(tensor, nn.Parameter):
            return tensor.requires_grad
        return self.use_buffers and isinstance(tensor, Tensor) and tensor.is_floating_point()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts steps from those of the checkpoint that a run is resumed from."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Updates the average if this batch has ended an optimizer step."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        last = step - 1  # counted from 0
        if last >= self.update_starting_at_step and last % self.update_every_n_steps == 0:
            self._update_average()

    @property
    def average_tensors(self) -> list[Tensor]:
        """Returns the averages on this rank."""
        return list(self._average.values())

    @torch.no_grad()
    def _update_average(self) -> None:
        if not self._average:
            self._average = self._allocate_average()
            for weight, average in self._iter_pairs():
                average.copy_(weight)
            return
        for weight, average in self._iter_pairs():
            average.lerp_(weight.float(), 1 - self.decay)

    def _average_by_name(self, trainer: Trainer) -> dict[str, Tensor]:
        """Returns the average by names in the whole model: one for both ends of a pipeline."""
        canonical = trainer_strategy(trainer).canonical_name
        return {canonical(name): average for name, average in self._average.items()}

    def _allocate_average(self) -> dict[str, Tensor]:
        """Returns uninitialized averages; names of one tied weight share one tensor."""
        made: dict[int, Tensor] = {}
        for tensor in self._weights.values():
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty_like(tensor.detach(), dtype=torch.float32)
        return {name: made[id(tensor)] for name, tensor in self._weights.items()}

    def _iter_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields what this rank holds of each weight and of its average, each once."""
        seen: set[int] = set()
        for name, tensor in self._weights.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (
                    grad_norm.local_tensor(tensor.detach()),
                    grad_norm.local_tensor(self._average[name]),
                )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average in the place of the weights."""
        if not self._average:
            return
        pairs = list(self._iter_pairs())
        self._raw_weights = [weight.clone() for weight, _ in pairs]
        for weight, average in pairs:
            weight.copy_(average)
        trainer_strategy(trainer).reshard()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the weights back."""
        if not self._raw_weights:
            return
        for (weight, _), raw in zip(self._iter_pairs(), self._raw_weights, strict=True):
            weight.copy_(raw)
        self._raw_weights = []
        trainer_strategy(trainer).reshard()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the average, which the strategy writes next to the weights."""
        if self._average:
            checkpoint[store.AVERAGE] = self._average_by_name(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Reads the average, where the run that saved the checkpoint had one."""
        path = trainer_strategy(trainer).resume_path
        if "averaging_state" in checkpoint:  # of Lightning's callback, which saves it as the model
            reason = "holds averaged weights in the place of those that were trained"
            raise CheckpointError.for_key("resume", path, reason, "set resume=null")
        if store.has_tensors(path, store.AVERAGE):
            self._average = self._allocate_average()
            held = self._average_by_name(trainer)
            store.read_into(path, store.AVERAGE, held)
            for name, average in self._average.items():
                if (read := held[trainer_strategy(trainer).canonical_name(name)]) is not average:
                    grad_norm.local_tensor(average).copy_(grad_norm.local_tensor(read))
