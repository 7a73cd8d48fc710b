"""DeepSpeed's engine in the suite: its ZeRO and offload, our weights, losses and checkpoints."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.checkpoints import store
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import StrategyBuffers
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.precision import FloatFormat
from scalewise.strategies import deepspeed_ops, zero3_init
from scalewise.strategies.base import Batch, ParallelStrategy, ScaledLoss
from scalewise.strategies.nvme_swap import SwapFolder

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


class ScalewiseDeepSpeedStrategy(ParallelStrategy, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, on the CPU as well, which Lightning refuses."""

    spec: DeepSpeedConfig
    run: RunConfig

    def __init__(self, spec: DeepSpeedConfig, device: DeviceKind) -> None:
        os.environ["DS_ACCELERATOR"] = device.value  # read when deepspeed is first imported
        config = {"zero_optimization": {"stage": spec.stage}}
        super().__init__(config=config, logging_level=logging.ERROR)
        self.spec, self._device = spec, device
        self._swap_folder = (
            SwapFolder(spec.nvme_path) if "async_io" in spec.native_extensions else None
        )
        self._grad_norm = torch.zeros(())

    def setup_environment(self) -> None:
        """Joins the ranks."""
        # DeepSpeed calls collectives by the names that torch 2.13 has replaced, at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Joins the ranks as DDP does, and tells DeepSpeed."""
        import deepspeed

        super(DeepSpeedStrategy, self).setup_distributed()
        self._set_node_environment_variables()
        if self._device is DeviceKind.cpu:
            # No shared-memory collectives: gloo's are as exact, and need no compiler.
            deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(self._process_group_backend)
        for name in self.spec.native_extensions:
            deepspeed_ops.load_extension(name, self._device)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Does nothing: ``build`` shares weights out layer by layer."""
        yield

    def build(self, run: RunConfig) -> nn.Module:
        """Returns the model, in stage 3 with the shards of this rank.

        No more than one layer is held whole at any time in stage 3.
        """
        self.run = run
        folder = str(self._swap_folder.open()) if self._swap_folder else ""
        self.config = self.spec.build_config(
            run, folder, run.model.num_parameters, run.trainable_parameters
        )
        if self.spec.stage < 3:
            with self.root_device:
                return super().build(run)
        return zero3_init.build_zero3_sharded(run, self.config, self.root_device)

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Notes the run: DeepSpeed shares a user's module out itself, when it is set up."""
        super().prepare_user_module(run, module)
        held = [*module.parameters()]
        counts = sum(p.numel() for p in held), sum(p.numel() for p in held if p.requires_grad)
        self.run, self.config = run, self.spec.build_config(run, "", *counts)

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Returns the run's optimizer; where its state is on the host, DeepSpeed's for the CPU."""
        if self.spec.offload_optimizer is OffloadTarget.none:
            return super().build_optimizer(run, module)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adamw = run.optimizer
        assert isinstance(adamw, AdamWConfig)
        optimizer: Optimizer = DeepSpeedCPUAdam(
            adamw.build_parameter_groups(self.iter_weights(run, module)),
            lr=adamw.lr,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.epsilon,
            adamw_mode=True,
            fp32_optimizer_states=run.precision.parameters is FloatFormat.fp32,
        )
        return optimizer

    def setup(self, trainer: Trainer) -> None:
        """Makes DeepSpeed's engine around the module."""
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()
        optimizer, schedule = self._init_optimizers()
        engine, zero, _, _ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        self.model, self.optimizers = engine, [zero]
        self.lr_scheduler_configs = [schedule] if schedule else []
        cut = self.run.precision.parameters is not self.run.precision.compute
        if cut and not self._saves_group_settings:
            self._init_masters()
        self.barrier()

    def _init_masters(self) -> None:
        """Gives the masters the weights as drawn: DeepSpeed made them of weights cut to bf16."""
        from scalewise.strategies import zero_state_dict

        drawn: dict[str, Tensor] = {}
        pieces = zero3_init.iter_layers(self.run, self.root_device)

        def read(name: str, whole: Tensor) -> None:
            own = name.removeprefix("model.")
            while own not in drawn:
                drawn.clear()
                named = next(pieces).named_parameters()
                drawn.update((self.canonical_name(name), parameter) for name, parameter in named)
            whole.copy_(drawn[own].detach())

        zero_state_dict.load_weights(self.optimizers[0], self._parameter_names(), read)

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Returns the loss of a micro batch; DeepSpeed is told whether a step follows."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(last)
        return super().compute_train_loss(module, batch, loss, last=last)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Does nothing: ``compute_train_loss`` has told DeepSpeed."""
        yield

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Returns False: Lightning divides by the micro batches, and steps after the last."""
        return False

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Goes backward, dividing by nothing."""
        return super().backward(closure_loss, *args, **kwargs, scale_wrt_gas=False)

    def clip_grad_norm(self, module: nn.Module, max_norm: float | None) -> Tensor:
        """Returns the norm, to be filled in by the step: DeepSpeed takes it and clips there."""
        self._grad_norm = torch.zeros((), dtype=torch.float32, device=self.root_device)
        return self._grad_norm

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: LightningModule | Any = None,
        **kwargs: Any,
    ) -> Any:
        """Steps; a gradient that is not finite has an infinite norm, and moves nothing."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        engine = self.deepspeed_engine
        skipped = engine.optimizer.overflow
        self._grad_norm.fill_(float("inf") if skipped else engine.get_global_grad_norm())
        return output

    def strategy_buffers(self) -> StrategyBuffers:
        """Returns the masters, shards and reduced gradients of ZeRO's optimizer."""
        from scalewise.strategies import zero_state_dict

        return zero_state_dict.ZeroPartition(self.optimizers[0], self._parameter_names())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the masters, whole, on rank 0 alone; every rank must ask."""
        from scalewise.strategies import zero_state_dict

        whole = {}
        for parameter, name in self._parameter_names().items():
            master = zero_state_dict.full_weight(parameter)
            if self.is_global_zero:
                whole[name] = master.cpu()
        return whole

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes one file of weights and one of state, by name: nothing of DeepSpeed's own."""
        from scalewise.strategies import zero_state_dict

        model = checkpoint.pop("state_dict")
        states = {}
        for key, state in zero_state_dict.iter_state(self.optimizers[0], self._parameter_names()):
            if self.is_global_zero:
                states[key] = state.cpu()
        if self.is_global_zero:
            tensors = self.writer.stage({"model": model, "optimizer": states})
            path, rest = Path(filepath), store.pack_state(checkpoint)
            self.writer.submit(lambda: store.save_checkpoint(path, tensors, rest))
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the masters of any layout's checkpoint; returns the rest of it."""
        from scalewise.strategies import zero_state_dict

        self._resume_path = path = Path(checkpoint_path)
        checkpoint = store.load_state(path)
        zero_state_dict.load_weights(
            self.optimizers[0],
            self._parameter_names(),
            lambda name, whole: store.read_into(path, "model", {name: whole}),
        )
        return {**checkpoint, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: the weights are read already."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads the optimizer's tensors."""
        from scalewise.strategies import zero_state_dict

        assert self._resume_path is not None
        path = self._resume_path
        zero_state_dict.load_states(
            self.optimizers[0],
            self._parameter_names(),
            store.tensor_shapes(path, "optimizer"),
            lambda key, whole: store.read_into(path, "optimizer", {key: whole}),
        )

    def teardown(self) -> None:
        """Lets go of the engine, and of what it left on a disk."""
        super().teardown()
        if self._swap_folder:
            self._swap_folder.close()
