"""One strategy for every product of pipeline, replicate, shard, context and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from scalewise.measure.memory import StrategyBuffers
from scalewise.parallelism.mesh import AXES, MeshConfig
from scalewise.strategies import grad_norm, parallelize, tensor_parallel
from scalewise.strategies.base import Batch, ParallelStrategy, ScaledLoss
from scalewise.strategies.context_parallel import SequenceSharding

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig
    from scalewise.strategies.pipeline_parallel import PipelineRunner


class FSDPBuffers(StrategyBuffers):
    """The whole weights that FSDP gathers into storage that it resizes, and whole gradients."""

    def __init__(self, module: nn.Module, receive_buffers: Callable[[], list[Tensor]]) -> None:
        self._module, self._receive_buffers = module, receive_buffers

    def resizable(self) -> list[Tensor]:
        """Returns them, in whatever size they have now, and a pipeline's buffers."""
        held = self._fsdp_parameters()
        gathered = [tensor for parameter in held for tensor in parameter.all_gather_outputs]
        return [*gathered, *self._receive_buffers()]

    def gradients(self) -> list[Tensor]:
        """Returns the whole gradients of micro batches whose reduction is put off."""
        found: list[Tensor | None] = []
        for parameter in self._fsdp_parameters():
            found.append(parameter.unsharded_accumulated_grad)
            if hasattr(parameter, "_unsharded_param"):
                found.append(parameter._unsharded_param.grad)
        return [gradient for gradient in found if gradient is not None]

    def _fsdp_parameters(self) -> list[Any]:
        parts = [part for part in self._module.modules() if isinstance(part, FSDPModule)]
        groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]
        return [parameter for group in groups if group for parameter in group.fsdp_params]


class MeshStrategy(ParallelStrategy, ModelParallelStrategy):
    """Lightning's model-parallel strategy over a named mesh of five axes."""

    spec: MeshConfig
    has_sharded_state = True

    def __init__(self, spec: MeshConfig) -> None:
        super().__init__()
        self.spec = spec
        self._sequence_sharding: SequenceSharding | None = None
        self._pipeline: PipelineRunner | None = None

    def setup_environment(self) -> None:
        """Joins the ranks and lays the mesh over them."""
        self._setup_distributed()
        sizes = self.spec.sizes
        # FSDP shards over the context ranks as well: to the model's mesh the two are one axis.
        shape = {**sizes, "shards": sizes["shards"] * sizes["context"]}
        names = tuple(axis for axis in AXES if axis != "context")
        self._device_mesh = self._build_mesh(shape, names)
        self._full_mesh = (
            self._build_mesh(sizes, AXES) if sizes["context"] > 1 else self._device_mesh
        )

    def _build_mesh(self, sizes: dict[str, int], names: tuple[str, ...]) -> DeviceMesh:
        shape = tuple(sizes[name] for name in names)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def axis_mesh(self, name: str) -> DeviceMesh | None:
        """Returns the ranks that differ from this one along an axis alone; None for size 1."""
        mesh = self._full_mesh if name == "context" else self.device_mesh
        return mesh[name] if self.spec.sizes[name] > 1 else None

    def build(self, run: RunConfig) -> nn.Module:
        """Returns this rank's shards, made without ever holding the whole model."""
        context = self.axis_mesh("context")
        if context is not None:
            self._sequence_sharding = SequenceSharding(
                context, run.data.sequence, balanced=self.spec.balanced
            )
        parts = run.model.split_stages(self.spec.num_stages, run.data.sequence)
        mine = self.spec.stage_indices(self.global_rank)
        stages = [
            parallelize.build_sharded(run, parts[index], self, self._sequence_sharding)
            for index in mine
        ]
        if self.axis_mesh("pipeline") is None:
            return stages[0]
        # torch's pipelining takes longer to import than a small model to build.
        from scalewise.strategies.pipeline_parallel import PipelineRunner

        self._pipeline = PipelineRunner(self.spec, self.device_mesh["pipeline"], mine, stages, run)
        self.fuses_forward_backward = True
        return nn.ModuleDict({f"stage{index}": s for index, s in zip(mine, stages, strict=True)})

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Shards a user's module once it is whole, where Lightning asks for it."""
        super().prepare_user_module(run, module)
        whole = module.configure_model

        def configure_model() -> None:
            whole()
            if not isinstance(module, FSDPModule):
                parallelize.shard_user_module(module, run, self)

        module.configure_model = configure_model  # type: ignore[method-assign]  # of this one alone

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Returns the run's optimizer over this rank's shards, which are final by now."""
        if self.axis_mesh("tensor") is not None:
            tensor_parallel.keep_gradients_sharded(module)
        if self._pipeline is not None:
            self._pipeline.find_tied_parameters()
        return super().build_optimizer(run, module)

    def reshard(self) -> None:
        """Reshards what a forward pass without a backward has left unsharded."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def canonical_name(self, name: str) -> str:
        """Returns a tensor's name in the whole model: no stage is part of it."""
        head, *rest = name.split(".")
        if rest and rest[0].startswith("stage") and self._pipeline is not None:
            name = ".".join([head, *rest[1:]])
        return super().canonical_name(name)

    def shard_batch(self, batch: Batch) -> Batch:
        """Returns this context rank's tokens of every row."""
        return (
            batch if self._sequence_sharding is None else self._sequence_sharding.shard_batch(batch)
        )

    @contextmanager
    def loss_context(self) -> Iterator[None]:
        """Lets the loss read logits that are cut along the vocabulary."""
        if self.axis_mesh("tensor") is not None and self.spec.loss_parallel:
            with loss_parallel():
                yield
        else:
            yield

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Returns the loss of a micro batch; a pipeline has gone backward by then as well."""
        if self._pipeline is None:
            return super().compute_train_loss(module, batch, loss, last=last)
        with self.loss_context():
            return self._pipeline.compute_train_loss(self.shard_batch(batch), loss, last=last)

    def compute_validation_loss(self, module: nn.Module, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Returns the loss of a micro batch, without gradients."""
        if self._pipeline is None:
            return self.compute_train_loss(module, batch, loss, last=False)
        with self.loss_context():
            return self._pipeline.compute_validation_loss(self.shard_batch(batch), loss)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Goes backward; in a pipeline the schedule has done so, and callbacks hear of the end."""
        if self._pipeline is not None:
            assert self.lightning_module is not None
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        with self.loss_context():
            return super().backward(closure_loss, *args, **kwargs)

    def set_backward_callback(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called before a stage of a pipeline takes a piece backward."""
        if self._pipeline is not None:
            self._pipeline.before_backward = callback

    def strategy_buffers(self) -> StrategyBuffers:
        """Returns the tensors into which FSDP gathers weights."""
        assert self.model is not None
        received = self._pipeline.receive_buffers if self._pipeline is not None else list
        return FSDPBuffers(self.model, received)

    def clip_grad_norm(self, module: nn.Module, max_norm: float | None) -> Tensor:
        """Scales the whole gradient, wherever its pieces are; returns the norm it had."""
        if self._optimizer_in_backward is not None:
            return self._optimizer_in_backward.take_grad_norm()
        owned = self._pipeline.is_owned if self._pipeline is not None else lambda parameter: True
        gradients = [p.grad for p in module.parameters() if p.grad is not None and owned(p)]
        norm = grad_norm.global_grad_norm(gradients, self.spec.sizes["pipeline"], self.root_device)
        if max_norm is not None:
            grad_norm.clip_to_norm(module.parameters(), max_norm, norm)
        return norm

    def model_to_device(self) -> None:
        """Leaves the shards where they were made: on the device, or on the host if offloaded."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients whole until the last micro batch, if asked to."""
        assert self.model is not None
        kept = not self.spec.reduce_each_micro_batch
        roots = [part for part in self.model.modules() if kept and isinstance(part, FSDPModule)]
        for root in roots:
            root.set_requires_gradient_sync(False, recurse=False)
        yield
        for root in roots:
            root.set_requires_gradient_sync(True, recurse=False)
