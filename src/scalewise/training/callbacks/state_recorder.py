"""Recording of weights, gradients and samples on every rank, to compare parallelism strategies."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.callback_config import StateRecorderArgs
from scalewise.objectives import IGNORED
from scalewise.training.callbacks.metrics_recorder import trainer_strategy

BATCHES_FILE = "batches-{rank}.json"
"""Samples of each micro-batch that a rank has read."""
TENSORS_FILE = "{kind}-{step}-{rank}.safetensors"
"""Unsharded tensors of a rank: its initial weights, the gradients of a step, its final weights."""
INITIAL, GRADIENTS, FINAL, CONTRIBUTIONS = "initial", "gradients", "final", "contributions"
DROPOUT_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
DROPOUT_FIELDS = ("dropout", "attention_dropout")
"""Attributes of modules with a probability of functional dropout."""


class StateRecorder(StateRecorderArgs, Callback):
    """Write the weights, the gradients of each step before clipping, and hashes of the samples.

    Tensors are unsharded and have the names of the full model. A pipeline rank writes those of its
    stages. Dropout is turned off: its random numbers depend on the rank.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._batches: list[dict[str, Any]] = []
        self._accumulated: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turn dropout off, perturb the weights and write them."""
        if self.batches_per_step > 1:
            trainer.accumulate_grad_batches = self.batches_per_step
            if trainer.val_check_batch is not None:  # set from a number of steps
                trainer.val_check_batch *= self.batches_per_step
        for module in pl_module.modules():
            if isinstance(module, DROPOUT_MODULES):
                module.p = 0.0
            for name in DROPOUT_FIELDS:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        if self.perturbation:
            perturb_weights(pl_module, self.perturbation)
        strategy = trainer_strategy(trainer)
        self._write(trainer, pl_module, INITIAL, 0, strategy.full_parameter)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the samples of a micro-batch."""
        record = {"step": trainer.global_step, **describe_batch(batch)}
        self._batches.append(record)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the gradient of a micro-batch of the first step, on one device."""
        if not self.contributions or trainer.global_step:
            return
        number, previous = len(self._batches) - 1, self._accumulated
        named = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self._accumulated = {name: gradient.detach().clone() for name, gradient in named.items()}

        def last_part(parameter: nn.Parameter) -> Tensor | None:
            name = names[parameter]
            total = self._accumulated.get(name)
            return total if total is None or name not in previous else total - previous[name]

        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self._write(trainer, pl_module, CONTRIBUTIONS, number, last_part)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Write the gradients of the step."""
        strategy = trainer_strategy(trainer)
        self._write(trainer, pl_module, GRADIENTS, trainer.global_step, strategy.full_gradient)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final weights and the record of the samples."""
        strategy = trainer_strategy(trainer)
        self._write(trainer, pl_module, FINAL, 0, strategy.full_parameter)
        file = BATCHES_FILE.format(rank=trainer.global_rank)
        text = json.dumps(self._batches)
        Path(trainer.default_root_dir, file).write_text(text, encoding="utf-8")

    def _write(
        self,
        trainer: Trainer,
        module: LightningModule,
        kind: str,
        step: int,
        read: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        """Write what ``read`` returns for each parameter; the order of names is metadata."""
        strategy = trainer_strategy(trainer)
        tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            tensor = read(parameter)
            if tensor is not None:
                tensors[strategy.canonical_name(name)] = tensor.detach().cpu().clone().contiguous()
        file = TENSORS_FILE.format(kind=kind, step=step, rank=trainer.global_rank)
        metadata = {"order": json.dumps(list(tensors))}
        save_file(tensors, Path(trainer.default_root_dir, file), metadata)


@torch.no_grad()
def perturb_weights(module: nn.Module, perturbation: float) -> None:
    """Multiply each element by a random factor that differs from 1 by at most ``perturbation``.

    The module is not sharded. Packed weights are left out.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator) * 2 - 1
            factors = 1 + perturbation * noise.double().to(parameter.device)
            parameter.copy_(parameter.double() * factors)


def describe_batch(batch: Any) -> dict[str, Any]:
    """Hash of each sample of a batch, and its number of labels; None without ``labels``.

    Samples without a label, which only fill a micro-batch, are left out.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    data = (batch["inputs"], labels) if labels is not None and "inputs" in batch else batch
    tensors: list[Tensor] = []
    apply_to_collection(data, Tensor, tensors.append)
    leaves = [tensor for tensor in tensors if tensor.dim()]
    size = leaves[0].shape[0] if leaves else 0
    rows = [leaf.detach().cpu() for leaf in leaves if leaf.shape[0] == size]
    counts_B = None
    if isinstance(labels, Tensor) and labels.dim():
        counts_B = (labels != IGNORED).flatten(1).sum(1) if labels.dim() > 1 else labels != IGNORED
    hashes = []
    for index in range(size):
        if counts_B is None or (counts_B.shape[0] == size and counts_B[index]):
            digest = 0
            for leaf in rows:
                row = leaf[index].contiguous().flatten().view(torch.uint8).numpy()
                digest = zlib.crc32(row.tobytes(), digest)
            hashes.append(digest)
    return {"samples": hashes, "labels": None if counts_B is None else int(counts_B.sum())}
