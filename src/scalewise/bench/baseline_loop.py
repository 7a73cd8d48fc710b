"""Hand-written training loop, the baseline of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

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
from scalewise.precision import FloatFormat
from scalewise.run_config import RunConfig
from scalewise.strategies.ddp import CONSTANT_BUFFERS
from scalewise.training.lightning_module import build_lr_scheduler


class BaselineLoop:
    """Training loop with the model, data, precision, optimizer, schedule and clipping of a run.

    It compiles the model as a whole if the run compiles anything. Every rank must construct it.

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
        self._model = self._parallelize(build_model(run.model, run.seed).to(device))
        if run.is_compiled:
            self._model.compile()
        weights = {weight.name: weight for weight in run.weight_census()}
        parameters = [
            (weights[name.removeprefix("module.")], parameter)
            for name, parameter in self._model.named_parameters()
        ]
        self._optimizer = build_optimizer(run.optimizer, parameters)
        self._schedule = build_lr_scheduler(run.schedule, self._optimizer, steps)
        self.loss = torch.zeros(())

    def _parallelize(self, model: Any) -> nn.Module:
        parallelism, world_size = self._run.parallelism, self._run.world_size
        if world_size == 1:
            return cast(nn.Module, model)
        if isinstance(parallelism, DDPConfig):
            return DistributedDataParallel(
                model,
                bucket_cap_mb=parallelism.bucket_mib,
                gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
                **CONSTANT_BUFFERS,
            )
        mesh = init_device_mesh(self._device.type, (world_size,))
        for block in model.layers():
            fully_shard(block, mesh=mesh)
        sharded: nn.Module = fully_shard(model, mesh=mesh)
        return sharded

    def step(self) -> Tensor:
        """Take one optimizer step; return the loss of this rank."""
        batch = {name: x_BT.to(self._device) for name, x_BT in next(self._batches).items()}
        in_bf16 = self._run.precision.compute is FloatFormat.bf16
        with torch.autocast(self._device.type, torch.bfloat16, enabled=in_bf16):
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
