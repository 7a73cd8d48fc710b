"""N-dimensional parallelism over one mesh: pipeline, replication, sharding, context and tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from scalewise.compat.lightning import init_model_parallel
from scalewise.compat.torch_distributed import (
    fsdp_parameters,
    parameter_pair,
    unsharded_gradients,
)
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import StrategyBuffers
from scalewise.models.base_module import ModelModule
from scalewise.parallelism.mesh import AXES, EXPERT_AXES, MeshConfig
from scalewise.strategies import grad_norm, parallelize, tensor_parallel
from scalewise.strategies.base import Batch, ParallelStrategy, ScaledLoss
from scalewise.strategies.build import build_strategy
from scalewise.strategies.context_parallel import SequenceSharding
from scalewise.strategies.pipeline_parallel import PipelineRunner
from scalewise.strategies.single import SingleDevice

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


class FSDPBuffers(StrategyBuffers):
    """Unsharded parameters and gradients of FSDP, and receive buffers of a pipeline."""

    def __init__(self, module: nn.Module, receive_buffers: Callable[[], list[Tensor]]) -> None:
        self._module, self._receive_buffers = module, receive_buffers

    def module_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters with the shard in place of each gathered parameter."""
        shards = {
            id(gathered): shard for gathered, shard in map(parameter_pair, self._fsdp_parameters())
        }
        return [shards.get(id(it), it) for it in module.parameters()]

    def resizable(self) -> list[Tensor]:
        """All-gather outputs at their current size, and receive buffers of the pipeline."""
        parameters = self._fsdp_parameters()
        gathered = [tensor for parameter in parameters for tensor in parameter.all_gather_outputs]
        return [*gathered, *self._receive_buffers()]

    def gradients(self) -> list[Tensor]:
        """Unsharded gradients that wait for the last micro-batch to be reduced."""
        parameters = self._fsdp_parameters()
        return [gradient for it in parameters for gradient in unsharded_gradients(it)]

    def _fsdp_parameters(self) -> list[Any]:
        fsdp_modules = [
            module for module in self._module.modules() if isinstance(module, FSDPModule)
        ]
        return [parameter for module in fsdp_modules for parameter in fsdp_parameters(module)]


class MeshStrategy(ParallelStrategy, ModelParallelStrategy):
    """Lightning's model-parallel strategy over a named mesh of five axes."""

    spec: MeshConfig
    has_sharded_state = True

    def __init__(self, spec: MeshConfig, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self.spec = spec
        if spec.gathers_once:  # the micro-batch before the last frees no parameters
            self.num_probed_micro_batches = 2
        self.expert_mesh: DeviceMesh | None = None
        self._sequence_sharding: SequenceSharding | None = None
        self._pipeline: PipelineRunner | None = None
        self._stages: Sequence[ModelModule] = ()
        self._position_ids: dict[int, Tensor] = {}
        self._length = 0

    def setup_environment(self) -> None:
        """Initialize the process group and the device mesh."""
        init_model_parallel(self)
        sizes = self.spec.sizes
        # FSDP also shards over the context ranks: in the model's mesh both are one axis.
        shape = {**sizes, "shards": self.spec.parameter_shards}
        names = tuple(axis for axis in AXES if axis != "context")
        self._device_mesh = self._build_mesh(shape, names)
        self._full_mesh = (
            self._build_mesh(sizes, AXES) if sizes["context"] > 1 else self._device_mesh
        )
        if self.spec.expert > 1:
            self.expert_mesh = self._build_mesh(self.spec.expert_sizes, EXPERT_AXES)

    def _build_mesh(self, sizes: dict[str, int], names: tuple[str, ...]) -> DeviceMesh:
        shape = tuple(sizes[name] for name in names)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def axis_mesh(self, name: str) -> DeviceMesh | None:
        """One-dimensional submesh of this rank along an axis; None: the axis has size 1."""
        mesh = self._full_mesh if name == "context" else self.device_mesh
        return mesh[name] if self.spec.sizes[name] > 1 else None

    def build(self, run: RunConfig) -> nn.Module:
        """Build this rank's shards; the full model is never materialized."""
        context = self.axis_mesh("context")
        if context is not None:
            self._sequence_sharding = SequenceSharding(
                context, {*run.sequence_lengths.values()}, balanced=self.spec.balanced
            )
        stage_slices = run.model.split_stages(self.spec.num_stages, run.data.sequence)
        stage_indices = self.spec.stage_indices(self.global_rank)
        stages = [
            parallelize.build_sharded(run, stage_slices[index], self, self._sequence_sharding)
            for index in stage_indices
        ]
        self._stages, self._length = stages, 0
        self._position_ids = parallelize.position_ids(
            run, self._sequence_sharding, self.root_device
        )
        self._select_length(run.data.sequence)
        if self.axis_mesh("pipeline") is None:
            return stages[0]
        self._pipeline = PipelineRunner(
            self.spec, self.device_mesh["pipeline"], stage_indices, stages, run
        )
        self.fuses_forward_backward = True
        return nn.ModuleDict(
            {f"stage{index}": s for index, s in zip(stage_indices, stages, strict=True)}
        )

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Shard a user-defined module at the end of its ``configure_model``."""
        super().prepare_user_module(run, module)
        configure_full_model = module.configure_model

        def configure_model() -> None:
            configure_full_model()
            if not isinstance(module, FSDPModule):
                parallelize.shard_user_module(module, run, self)

        module.configure_model = configure_model  # type: ignore[method-assign]  # of this instance

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Build the optimizer over this rank's shards, which are final at this point."""
        if self.axis_mesh("tensor") is not None:
            tensor_parallel.keep_gradients_sharded(module)
        if self._pipeline is not None:
            self._pipeline.find_tied_parameters()
        return super().build_optimizer(run, module)

    def update_forward_weights(self) -> None:
        """Reshard modules that a forward pass without a backward pass has left unsharded."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def canonical_name(self, name: str) -> str:
        """Name of a tensor in the full model, without its pipeline stage."""
        root, *path = name.split(".")
        if path and path[0].startswith("stage") and self._pipeline is not None:
            name = ".".join([root, *path[1:]])
        return super().canonical_name(name)

    def shard_batch(self, batch: Batch) -> Batch:
        """Tokens of this context rank, of every sequence, whose length may be that of a warm-up."""
        if len(self._position_ids) > 1:
            self._select_length(batch["labels"].shape[1])
        return (
            batch if self._sequence_sharding is None else self._sequence_sharding.shard_batch(batch)
        )

    def _select_length(self, length: int) -> None:
        """Set the positions of this rank's tokens in sequences of ``length`` tokens."""
        if length == self._length:
            return
        self._length = length
        if self._sequence_sharding is not None:
            self._sequence_sharding.select_length(length)
        for stage in self._stages:
            stage.set_position_ids(self._position_ids[length])

    @contextmanager
    def loss_context(self) -> Iterator[None]:
        """Context in which the loss reads logits sharded along the vocabulary."""
        if self.axis_mesh("tensor") is not None and self.spec.loss_parallel:
            with loss_parallel():
                yield
        else:
            yield

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Compute the loss of a micro-batch; a pipeline also runs the backward pass."""
        if self._pipeline is None:
            return super().compute_train_loss(module, batch, loss, last=last)
        with self.loss_context():
            return self._pipeline.compute_train_loss(self.shard_batch(batch), loss, last=last)

    def compute_validation_loss(self, module: nn.Module, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Compute the loss of a micro-batch, without gradients."""
        if self._pipeline is None:
            return self.compute_train_loss(module, batch, loss, last=False)
        with self.loss_context():
            return self._pipeline.compute_validation_loss(self.shard_batch(batch), loss)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass.

        A pipeline schedule has run it already; only the callbacks for its end are called.
        """
        if self._pipeline is not None:
            assert self.lightning_module is not None
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        with self.loss_context():
            return super().backward(closure_loss, *args, **kwargs)

    def sum_over_data_ranks(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks of this pipeline stage with other tokens, in place."""
        for axis in ("replicate", "shards"):
            if (mesh := self.device_mesh[axis]).size() > 1:
                dist.all_reduce(tensor, group=mesh.get_group())

    def set_backward_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback before each backward pass of a pipeline micro-batch."""
        if self._pipeline is not None:
            self._pipeline.before_backward = callback

    def strategy_buffers(self) -> StrategyBuffers:
        """Buffers of FSDP and of the pipeline."""
        assert self.model is not None
        receive_buffers = self._pipeline.receive_buffers if self._pipeline is not None else list
        return FSDPBuffers(self.model, receive_buffers)

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float | Tensor | None
    ) -> Tensor:
        """Clip the gradient over all ranks to ``max_norm``, in place.

        Returns its norm before clipping.
        """
        if self._optimizer_in_backward is not None:
            return self._optimizer_in_backward.take_grad_norm()
        is_owned = self._pipeline.is_owned if self._pipeline is not None else lambda parameter: True
        gradients = [p.grad for p in parameters if p.grad is not None and is_owned(p)]
        norm = grad_norm.global_grad_norm(gradients, self.spec.sizes["pipeline"], self.root_device)
        if max_norm is not None:
            grad_norm.clip_to_norm(parameters, max_norm, norm)
        return norm

    def model_to_device(self) -> None:
        """Do nothing: shards are created on their device."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Delay gradient reduction and resharding until the last micro-batch, as configured."""
        assert self.model is not None
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self._set_backward_end(
            modules, syncs=not self.spec.delays_reduction, reshards=not self.spec.gathers_once
        )
        yield
        self._set_backward_end(modules, syncs=True, reshards=True)

    @staticmethod
    def _set_backward_end(modules: Sequence[FSDPModule], *, syncs: bool, reshards: bool) -> None:
        """Set whether a backward pass reduces gradients, and whether it frees parameters."""
        for module in modules:
            module.set_requires_gradient_sync(syncs, recurse=False)
            module.set_reshard_after_backward(reshards, recurse=False)


@build_strategy.register
def _build_mesh(config: MeshConfig, device: DeviceKind, timeout: timedelta) -> ParallelStrategy:
    return MeshStrategy(config, timeout) if config.uses_process_group else SingleDevice(device)
