"""Hand-written PyTorch training loop with DDP or ``fully_shard``, the baseline of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalewise.data.dataloader import Batch
from scalewise.models.build import build_model
from scalewise.objectives.losses import sum_over_tokens
from scalewise.optimizers.build import build_optimizer
from scalewise.parallelism.ddp import DDPConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.ddp import CONSTANT_BUFFERS
from scalewise.training.lightning_module import build_lr_scheduler


class BaselineLoop:
    """Training loop with the model, data, optimizer, schedule and clipping of a run.

    Every rank must construct it.

    Args:
        run: Config of the run.
        steps: Length of the learning-rate schedule.
        batches: Batches of this rank.
        device: Device of this rank.
    """

    def __init__(
        self, run: RunConfig, steps: int, batches: Iterator[Batch], device: torch.device
    ) -> None:
        self._run, self._batches, self._device = run, batches, device
        self._labels = run.tokens_per_step // run.world_size
        model: Any = build_model(run.model, run.seed).to(device)
        if isinstance(run.parallelism, DDPConfig):
            self._model: nn.Module = DistributedDataParallel(
                model,
                bucket_cap_mb=run.parallelism.bucket_mib,
                gradient_as_bucket_view=run.parallelism.gradient_as_bucket_view,
                **CONSTANT_BUFFERS,
            )
        else:
            mesh = init_device_mesh(device.type, (run.world_size,))
            for block in model.layers():
                fully_shard(block, mesh=mesh)
            self._model = fully_shard(model, mesh=mesh)
        weights = {weight.name: weight for weight in run.weight_census()}
        parameters = [
            (weights[name.removeprefix("module.")], parameter)
            for name, parameter in self._model.named_parameters()
        ]
        self._optimizer = build_optimizer(run.optimizer, parameters)
        self._schedule = build_lr_scheduler(run.schedule, self._optimizer, steps)
        self.loss = torch.zeros(())

    def step(self) -> Tensor:
        """Take one optimizer step; return the loss of this rank."""
        batch = {name: x_BT.to(self._device) for name, x_BT in next(self._batches).items()}
        logits_BTV = self._model(batch["inputs"])
        loss = sum_over_tokens(self._run.objective, logits_BTV, batch["labels"]) / self._labels
        loss.backward()
        limit = self._run.trainer.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self.loss = loss.detach()
        return self.loss
