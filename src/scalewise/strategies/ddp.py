"""DDP strategy, with communication hooks, local SGD and sharded optimizer state."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scalewise.compat.lightning import ddp_arguments
from scalewise.hardware import DeviceKind
from scalewise.optimizers.build import (
    build_from_groups,
    build_parameter_groups,
    set_replicas,
)
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.strategies.build import build_strategy

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

_BUFFERS_NAME = "forward_sync_buffers"  # since torch 2.13
_HAS_NEW_NAME = _BUFFERS_NAME in signature(DistributedDataParallel).parameters
CONSTANT_BUFFERS: dict[str, Any] = {_BUFFERS_NAME if _HAS_NEW_NAME else "broadcast_buffers": False}
"""Disables the broadcast of buffers at each forward pass: they depend on shapes alone."""


class DataParallelStrategy(ParallelStrategy, DDPStrategy):
    """Lightning's DDP strategy, with communication hooks on every device."""

    spec: DDPConfig

    def __init__(self, spec: DDPConfig, timeout: timedelta) -> None:
        super().__init__(
            timeout=timeout,
            bucket_cap_mb=spec.bucket_mib,
            gradient_as_bucket_view=spec.gradient_as_bucket_view,
            static_graph=spec.static_graph,
            **CONSTANT_BUFFERS,
        )
        self.spec = spec
        self._averager: PeriodicModelAverager | None = None

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Broadcast buffers at each forward pass, as torch's default: they may change."""
        super().prepare_user_module(run, module)
        for name in CONSTANT_BUFFERS:
            del ddp_arguments(self)[name]

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Optimizer of the run; ``optimizer.shard`` partitions its state over ranks (ZeRO-1)."""
        if not run.optimizer.shard:
            optimizer = super().build_optimizer(run, module)
            if self.spec.averages_gradients:
                world = dist.group.WORLD
                assert world is not None
                set_replicas(run.optimizer, optimizer, world)
            return optimizer
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.script.*")  # raised within torch
            from torch.distributed.optim import ZeroRedundancyOptimizer
        self.has_sharded_state = True
        groups = build_parameter_groups(run.optimizer, self.iter_weights(run, module))
        # typed as a class, but only called
        optimizer_class: Any = partial(build_from_groups, run.optimizer)
        return ZeroRedundancyOptimizer(groups, optimizer_class)

    def configure_ddp(self) -> None:
        """Wrap the module in DDP, with the communication hook of the config.

        On the current stream: on Lightning's side stream, backward passes wait for each gradient.
        """
        assert self.model is not None
        self.model = DistributedDataParallel(
            self.model, device_ids=self.determine_ddp_device_ids(), **ddp_arguments(self)
        )
        self._register_comm_hook(self.model)

    def _register_comm_hook(self, module: DistributedDataParallel) -> None:
        hook = self.spec.comm_hook
        if hook is CommHook.none:
            return
        if hook is CommHook.post_local_sgd:
            local_group, _ = dist.new_subgroups(group_size=1)
            state: Any = post_localSGD_hook.PostLocalSGDState(
                None, local_group, self.spec.lossless_steps
            )
            self._averager = PeriodicModelAverager(
                self.spec.averaging_period, warmup_steps=self.spec.lossless_steps
            )
            function: Any = post_localSGD_hook.post_localSGD_hook
        elif hook.is_powersgd:
            state = powerSGD_hook.PowerSGDState(
                None, self.spec.powersgd_rank, self.spec.lossless_steps
            )
            function = powerSGD_hook.powerSGD_hook
            if hook is CommHook.fp16_powersgd:
                function = default_hooks.fp16_compress_wrapper(function)
            if self.root_device.type == "cpu":
                function = _one_bucket_at_a_time(function)
        else:
            state, function = None, getattr(default_hooks, f"{hook}_compress_hook")
        module.register_comm_hook(state, function)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; with local SGD, average the parameters over ranks first."""
        if self._averager is not None:
            world = dist.group.WORLD
            assert world is not None
            assert self.lightning_module is not None
            average_parameters(self.lightning_module.parameters(), world)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: LightningModule | Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step; with local SGD, also average the parameters when it is due."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._averager is not None:
            assert self.lightning_module is not None
            self._averager.average_parameters(self.lightning_module.parameters())
        return output


@build_strategy.register
def _build_ddp(config: DDPConfig, device: DeviceKind, timeout: timedelta) -> DataParallelStrategy:
    return DataParallelStrategy(config, timeout)


def _one_bucket_at_a_time(hook: Any) -> Any:
    """Communication hook that waits for the gradients of a bucket.

    PowerSGD starts the later reductions of a bucket in threads of gloo. Without waiting, those of
    several buckets start in another order on each rank.
    """

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        future = hook(state, bucket)
        future.wait()
        return future

    return reduce
