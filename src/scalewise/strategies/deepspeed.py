"""DeepSpeed's ZeRO and offload, with scalewise's initialization, losses and checkpoints."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.checkpoints import store
from scalewise.compat.deepspeed import disable_native_ops, wrap_gathers
from scalewise.compat.lightning import init_optimizers, set_node_environment
from scalewise.compat.torch import without_dispatch_modes
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import StrategyBuffers
from scalewise.models.base import Weight
from scalewise.models.op_graph import Recompute
from scalewise.optimizers import AdamWConfig
from scalewise.optimizers.build import build_parameter_groups
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.precision import FloatFormat
from scalewise.strategies import deepspeed_ops, deepspeed_setup, zero_state_dict
from scalewise.strategies.base import Batch, ParallelStrategy, ScaledLoss
from scalewise.strategies.build import build_strategy
from scalewise.strategies.deepspeed_setup import SwapFolder, build_deepspeed_config

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


class ScalewiseDeepSpeedStrategy(ParallelStrategy, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, extended to the CPU, which Lightning rejects."""

    spec: DeepSpeedConfig
    run: RunConfig

    def __init__(self, spec: DeepSpeedConfig, device: DeviceKind, timeout: timedelta) -> None:
        os.environ["DS_ACCELERATOR"] = device.value  # read when deepspeed is first imported
        config = {"zero_optimization": {"stage": spec.stage}}
        super().__init__(config=config, logging_level=logging.ERROR, timeout=timeout)
        self.spec, self._device = spec, device
        self._swap_folder = (
            SwapFolder(spec.nvme_path) if "async_io" in spec.native_extensions else None
        )
        self._grad_norm = torch.zeros(())
        self._checkpoints_selectively = False

    def setup_environment(self) -> None:
        """Initialize the process group."""
        # At every step, DeepSpeed calls collectives by names that torch 2.13 has deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Initialize the process group as DDP does, and DeepSpeed with it."""
        import deepspeed

        super(DeepSpeedStrategy, self).setup_distributed()
        set_node_environment(self)
        if self._device is DeviceKind.cpu:
            # Gloo instead of DeepSpeed's shared-memory collectives, which need a compiler.
            disable_native_ops()
        deepspeed.init_distributed(self.process_group_backend)
        for name in self.spec.native_extensions:
            deepspeed_ops.load_extension(name, self._device)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Do nothing: ``build`` partitions parameters layer by layer."""
        yield

    def build(self, run: RunConfig) -> nn.Module:
        """Build the model, in stage 3 with this rank's partition of every parameter.

        In stage 3, at most one layer is unpartitioned at any time.
        """
        self.run = run
        recompute_modes = run.memory.count_by_recompute(run.model.layers)
        self._checkpoints_selectively = Recompute.selective in recompute_modes
        folder = str(self._swap_folder.open()) if self._swap_folder else ""
        self.config = build_deepspeed_config(
            self.spec, run, folder, run.model.num_parameters, run.trainable_parameters
        )
        if self.spec.stage < 3:
            with self.root_device:
                return super().build(run)
        return deepspeed_setup.build_zero3_sharded(run, self.config, self.root_device)

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Store the run; DeepSpeed partitions a user-defined module in ``setup``."""
        super().prepare_user_module(run, module)
        parameters = [*module.parameters()]
        counts = (
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
        )
        self.run = run
        self.config = build_deepspeed_config(self.spec, run, "", *counts)

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Build the optimizer; with offloaded state, DeepSpeed's CPU Adam."""
        if self.spec.offload_optimizer is OffloadTarget.none:
            return super().build_optimizer(run, module)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adamw = run.optimizer
        assert isinstance(adamw, AdamWConfig)
        optimizer: Optimizer = DeepSpeedCPUAdam(
            build_parameter_groups(adamw, self.iter_weights(run, module)),
            lr=adamw.lr,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.epsilon,
            adamw_mode=True,
            fp32_optimizer_states=run.precision.parameters is FloatFormat.fp32,
        )
        return optimizer

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module in DeepSpeed's engine."""
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()
        optimizer, schedule = init_optimizers(self)
        engine, zero, _, _ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        self.model, self.optimizers = engine, [zero]
        if self.spec.stage == 3 and self._checkpoints_selectively:
            # Recomputation gathers other modules than the forward pass, which prefetches.
            wrap_gathers(zero, without_dispatch_modes)
        self.lr_scheduler_configs = [schedule] if schedule else []
        has_rounded_masters = self.run.precision.parameters is not self.run.precision.compute
        if has_rounded_masters and not self._saves_group_settings:
            self._init_masters()
        self.barrier()

    def _init_masters(self) -> None:
        """Set the master weights to the initial values in fp32.

        DeepSpeed has copied them from parameters that were rounded to bf16.
        """
        layer_tensors: dict[str, Tensor] = {}
        layers = deepspeed_setup.iter_layers(self.run, self.root_device)

        def read(name: str, tensor: Tensor) -> None:
            model_name = name.removeprefix("model.")
            while model_name not in layer_tensors:
                layer_tensors.clear()
                named_parameters = next(layers).named_parameters()
                layer_tensors.update(
                    (self.canonical_name(name), parameter) for name, parameter in named_parameters
                )
            tensor.copy_(layer_tensors[model_name].detach())

        # In the order of ``iter_layers``; a model of several stacks has its embeddings last.
        layer_index = {weight.name: _layer_position(weight) for weight in self.run.weight_census()}
        names = sorted(
            self._parameter_names().items(),
            key=lambda item: layer_index[item[1].removeprefix("model.")],
        )
        zero_state_dict.load_weights(self.optimizers[0], dict(names), read)

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Compute the loss of a micro-batch; ``last`` sets DeepSpeed's accumulation boundary."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(last)
        return super().compute_train_loss(module, batch, loss, last=last)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: ``compute_train_loss`` sets the accumulation boundary."""
        yield

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning divides the loss and steps after the last micro-batch."""
        return False

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass without DeepSpeed's division by accumulation steps."""
        return super().backward(closure_loss, *args, **kwargs, scale_wrt_gas=False)

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float | Tensor | None
    ) -> Tensor:
        """Gradient norm, as a tensor that ``optimizer_step`` fills in.

        DeepSpeed computes the norm and clips to it in its step.
        """
        self._grad_norm = torch.zeros((), dtype=torch.float32, device=self.root_device)
        return self._grad_norm

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: LightningModule | Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step and store the gradient norm.

        With a gradient that is not finite, DeepSpeed skips the step; the norm is then infinite.
        """
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        engine = self.deepspeed_engine
        skipped = engine.optimizer.overflow
        self._grad_norm.fill_(float("inf") if skipped else engine.get_global_grad_norm())
        return output

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Unpartitioned gradient of a parameter; None without one. All ranks must call this."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(parameter)
        return gradient

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Unpartitioned master weight. All ranks must call this."""
        return zero_state_dict.full_weight(parameter)

    def trained_shards(self) -> dict[str, Tensor]:
        """This rank's partitions of the flattened master weights, one per group."""
        masters = zero_state_dict.master_partitions(self.optimizers[0])
        return {f"masters.{group}": master for group, master in enumerate(masters)}

    def update_forward_weights(self) -> None:
        """Copy the master weights to the parameters; all ranks must call this."""
        zero_state_dict.copy_masters_to_weights(self.optimizers[0], self._parameter_names())

    def averages_by_name(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unpartitioned averages on rank 0, and those of buffers; all ranks must call this."""
        partitions, buffers = self._split_averages(averages)
        weights = zero_state_dict.iter_averages(
            self.optimizers[0], self._parameter_names(), partitions
        )
        by_name = super().averages_by_name(buffers)
        for name, average in weights:
            if self.is_global_zero:
                by_name[name] = average.cpu()
        return by_name

    def load_averages(self, averages: Mapping[str, Tensor]) -> None:
        """Read this rank's averages from the checkpoint that training resumes from."""
        path = self.resume_path
        partitions, buffers = self._split_averages(averages)
        zero_state_dict.load_averages(
            self.optimizers[0],
            self._parameter_names(),
            partitions,
            lambda name, tensor: store.read_into(path, store.AVERAGE, {name: tensor}),
        )
        if buffers:
            store.read_into(path, store.AVERAGE, super().averages_by_name(buffers))

    def _split_averages(
        self, averages: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Averages of the partitions of the master weights, and others by name."""
        masters = self.trained_shards()
        others = {name: average for name, average in averages.items() if name not in masters}
        return [averages[name] for name in masters], others

    def strategy_buffers(self) -> StrategyBuffers:
        """Master weights, partitions and reduced gradients of the ZeRO optimizer."""
        return zero_state_dict.ZeroPartition(self.optimizers[0], self._parameter_names())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Unpartitioned master weights, on rank 0 only; all ranks must call this."""
        weights = {}
        for parameter, name in self._parameter_names().items():
            master = zero_state_dict.full_weight(parameter)
            if self.is_global_zero:
                weights[name] = master.cpu()
        return weights

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write parameters and optimizer state by name; all ranks must call this.

        Checkpoints contain no file in a format of DeepSpeed's.
        """
        model, average = checkpoint.pop("state_dict"), checkpoint.pop(store.AVERAGE, None)
        states = {}
        for key, state in zero_state_dict.iter_state(self.optimizers[0], self._parameter_names()):
            if self.is_global_zero:
                states[key] = state.cpu()
        if self.is_global_zero:
            parts = {"model": model, "optimizer": states}
            if average:
                parts[store.AVERAGE] = average
            tensors = self.writer.stage(parts)
            path, packed_state = Path(filepath), store.pack_state(checkpoint)
            self.writer.submit(lambda: store.save_checkpoint(path, tensors, packed_state))
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the master weights from a checkpoint of any parallelism strategy.

        Returns the rest of the checkpoint.
        """
        self._resume_path = path = Path(checkpoint_path)
        checkpoint = store.load_state(path)
        zero_state_dict.load_weights(
            self.optimizers[0],
            self._parameter_names(),
            lambda name, tensor: store.read_into(path, "model", {name: tensor}),
        )
        return {**checkpoint, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: ``load_checkpoint`` has read the parameters."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the optimizer state."""
        assert self._resume_path is not None
        path = self._resume_path
        zero_state_dict.load_states(
            self.optimizers[0],
            self._parameter_names(),
            store.tensor_shapes(path, "optimizer"),
            lambda key, tensor: store.read_into(path, "optimizer", {key: tensor}),
        )

    def teardown(self) -> None:
        """Release the engine and remove its NVMe folder."""
        super().teardown()
        if self._swap_folder:
            self._swap_folder.close()


def _layer_position(weight: Weight) -> float:
    """Position of a weight: before all blocks, the index of its block, or after all blocks."""
    if weight.layer is not None:
        return weight.layer
    return -1 if weight.role in ("embedding", "position") else inf


@build_strategy.register
def _build_deepspeed(
    config: DeepSpeedConfig, device: DeviceKind, timeout: timedelta
) -> ScalewiseDeepSpeedStrategy:
    return ScalewiseDeepSpeedStrategy(config, device, timeout)
