"""Base class of parallelism strategies, with checkpoint reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scalewise.adapters.build import apply_adapter
from scalewise.checkpoints import initial_parameters, store
from scalewise.checkpoints.store import BackgroundWriter
from scalewise.checkpoints.strided_shards import with_contiguous_rows
from scalewise.compat.lightning import call_through_wrapper
from scalewise.measure.memory import StrategyBuffers
from scalewise.models.base import StageSlice, Weight
from scalewise.models.build import build_meta
from scalewise.models.init import full_tensor, local_tensor
from scalewise.objectives import ObjectiveConfig
from scalewise.objectives.losses import compute_loss, set_chunked_loss, token_sums_function
from scalewise.optimizers.build import build_optimizer, compile_updates
from scalewise.optimizers.stochastic_rounding import StochasticRoundingOptimizer
from scalewise.precision.build import apply_precision
from scalewise.quantization.build import apply_quantization
from scalewise.strategies import grad_norm, optimizer_state_dict
from scalewise.strategies.activation_checkpointing import apply_checkpointing, compile_module

if TYPE_CHECKING:
    from scalewise.checkpoint_config import CheckpointConfig
    from scalewise.run_config import RunConfig
    from scalewise.torch_compile import Compile

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ScaledLoss:
    """Summed loss of a micro-batch, multiplied by ``factor``."""

    objective: ObjectiveConfig
    factor: Tensor | float = 1.0
    compile_config: Compile | None = None
    """Config by which the sums over tokens are compiled; None: they are not."""
    accumulation: int = 1
    """Number of micro-batches of the step, by which Lightning divides the loss."""

    @property
    def computed_in_module(self) -> bool:
        """Whether the module computes the sums over tokens itself (chunked loss)."""
        return self.objective.loss_chunk is not None

    def compute(self, module: nn.Module, batch: Batch) -> Tensor:
        """Loss of a batch, with its forward pass through ``module``."""
        passes_labels = self.computed_in_module or self.objective.needs_encoder_decoder
        labels = batch["labels"] if passes_labels else None
        return self(module(batch["inputs"], labels, batch.get("positions")), batch)

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        """Loss from the output of a module: logits, or sums over tokens."""
        loss_sum = (
            output
            if self.computed_in_module
            else token_sums_function(self.objective, self.compile_config)(output, batch["labels"])
        )
        return compute_loss(self.objective, local_tensor(loss_sum), batch) * self.factor


class ParallelStrategy(Strategy):
    """Lightning strategy that also builds the model and shards its parameters.

    Subclasses combine it with one of Lightning's strategies.
    """

    writer: BackgroundWriter
    has_sharded_state = False
    """Whether ranks store different tensors, so that all of them write checkpoints."""
    fuses_forward_backward = False
    """Whether one call runs forward and backward, so that they cannot be timed apart."""
    num_probed_micro_batches = 1
    """Number of micro-batches at the end of a step of which one has the peak memory."""
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True
    _resume_path: Path | None = None
    _optimizer_in_backward: OptimizerInBackward | None = None
    _saves_group_settings = False

    def build(self, run: RunConfig) -> nn.Module:
        """Build the model, or this rank's shards of it, and initialize it from ``run.seed``."""
        all_layers = StageSlice(range(run.model.layers))
        module = build_meta(run.model, all_layers)
        module.set_sequence_weight(run.sequence_loss_weight)
        apply_quantization(run.quantization, module, run.model)
        apply_precision(run.precision, module, run.model, run.hardware.device)
        apply_adapter(run.adapter, module, run.model)
        module.to_empty(device=torch.get_default_device())
        initial_parameters.init_parameters(module, run.model, run.adapter, run.seed)
        set_chunked_loss(
            run.objective,
            module,
            in_forward=run.computes_loss_gradients_in_forward,
            compile_config=run.loss_compile,
        )
        apply_checkpointing(run.memory, module, all_layers, run.hardware.device)
        compile_module(run.applied_compile, module, len(run.sequence_lengths))
        return module

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Adapt a user-defined module, complete but not yet set up, to this strategy.

        From then on, checkpoints store the settings of its optimizer's parameter groups.
        """
        self._saves_group_settings = True

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Build the optimizer of the run over the parameters of this rank."""
        named_weights = [*self.iter_weights(run, module)]
        optimizer = build_optimizer(run.optimizer, named_weights)
        if run.precision.stochastic_rounding:
            names = {parameter: weight.name for weight, parameter in named_weights}
            optimizer = StochasticRoundingOptimizer(
                optimizer, names, run.seed, elementwise=run.optimizer.elementwise
            )
        if run.cuda_compile is not None:
            compile_updates(run.optimizer, optimizer, run.cuda_compile)
        if run.optimizer.in_backward:
            self._optimizer_in_backward = OptimizerInBackward(optimizer, self.root_device)
        return optimizer

    def iter_weights(
        self, run: RunConfig, module: nn.Module
    ) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Parameters of a module, each with its entry in the model's weight census."""
        weights_by_name = {weight.name: weight for weight in run.weight_census()}
        for name, parameter in module.named_parameters():
            full_name = self.canonical_name(f"model.{name}").removeprefix("model.")
            yield weights_by_name[full_name], parameter

    def shard_batch(self, batch: Batch) -> Batch:
        """Part of a batch that this rank processes: all of it unless tokens are sharded."""
        return batch

    def loss_context(self) -> AbstractContextManager[None]:
        """Context in which losses and their gradients are computed."""
        return nullcontext()

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Compute the loss of a micro-batch on this rank, ready for the backward pass.

        ``last``: no other micro-batch follows before the optimizer step.
        """
        batch = self.shard_batch(batch)
        with self.loss_context():
            return loss.compute(module, batch)

    def compute_validation_loss(self, module: nn.Module, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Compute the loss of a micro-batch on this rank, without gradients."""
        return self.compute_train_loss(module, batch, loss, last=False)

    @torch.no_grad()
    def call_no_grad(self, method: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a method of the module without gradients, through the strategy's wrapper."""
        assert self.lightning_module is not None
        with self.precision_plugin.forward_context():
            if self.model is self.lightning_module:
                return method(*args)
            return cast(Tensor, call_through_wrapper(self, method, *args))

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float | Tensor | None
    ) -> Tensor:
        """Clip the gradient over all ranks to ``max_norm``, in place.

        Returns its norm before clipping.
        """
        if self._optimizer_in_backward is not None:
            return self._optimizer_in_backward.take_grad_norm()
        norm = grad_norm.tensors_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(max_norm, Tensor):
            grad_norm.clip_to_norm(parameters, max_norm, norm)
        elif max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
        return norm

    def sum_over_data_ranks(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks with other tokens, in place; equal ranks may count twice."""
        if dist.is_initialized():
            dist.all_reduce(tensor)

    def set_backward_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback for backward passes that Lightning does not run.

        Only pipeline schedules have such passes.
        """

    def trained_shards(self) -> dict[str, Tensor]:
        """This rank's shards of the trained weights, by name; a tied weight has several names."""
        assert self.lightning_module is not None
        return {
            name: tensor
            for name, tensor in self.lightning_module.state_dict(keep_vars=True).items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }

    def update_forward_weights(self) -> None:
        """Let the next forward pass use ``trained_shards`` changed outside of the optimizer."""

    def averages_by_name(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Averages of ``trained_shards`` by name in the full model; all ranks must call this."""
        return {self.canonical_name(name): average for name, average in averages.items()}

    def load_averages(self, averages: Mapping[str, Tensor]) -> None:
        """Read averages of ``trained_shards`` from the checkpoint that training resumes from."""
        loaded = self.averages_by_name(averages)
        store.read_into(self.resume_path, store.AVERAGE, loaded)
        for name, average in averages.items():
            source = loaded[self.canonical_name(name)]
            if source is not average:  # two copies of a tied weight in a V-shaped pipeline
                local_tensor(average).copy_(local_tensor(source))

    @property
    def resume_path(self) -> Path:
        """Checkpoint that training resumes from; set when it is loaded."""
        assert self._resume_path is not None
        return self._resume_path

    def strategy_buffers(self) -> StrategyBuffers:
        """Tensors of the model on this rank outside of the module."""
        return StrategyBuffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Model tensors of this rank for a checkpoint; not copied."""
        assert self.lightning_module is not None
        return {
            self.canonical_name(name): tensor.detach()
            for name, tensor in self.lightning_module.state_dict().items()
        }

    def canonical_name(self, name: str) -> str:
        """Name of a tensor in the full model without adapter."""
        return name.replace(".base_layer.", ".")

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Unsharded gradient of a parameter; None without one. All ranks must call this."""
        return None if parameter.grad is None else full_tensor(parameter.grad)

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Unsharded parameter. All ranks must call this."""
        return full_tensor(parameter)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Optimizer counters for a checkpoint; state tensors are stored by name.

        For a user-defined module, all settings of the parameter groups.
        """
        if self._saves_group_settings:
            return {"groups": optimizer_state_dict.group_settings(optimizer)}
        return optimizer_state_dict.step_counts(optimizer)

    def setup_checkpoint_writer(self, checkpoint: CheckpointConfig) -> None:
        """Create the checkpoint writer; all ranks call this after setup."""
        self.writer = BackgroundWriter(
            background=checkpoint.background,
            device=self.root_device,
            collective=self.has_sharded_state,
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint folder; all ranks must call this."""
        model = checkpoint.pop("state_dict")
        average = checkpoint.pop(store.AVERAGE, None)
        if not (self.has_sharded_state or self.is_global_zero):
            return
        states = optimizer_state_dict.state_tensors(self.optimizers, self._parameter_names())
        parts = {"model": model, "optimizer": states}
        if average:
            parts[store.AVERAGE] = average
        parts = {part: with_contiguous_rows(named) for part, named in parts.items()}
        tensors = self.writer.stage(parts)
        path, state, group = Path(filepath), store.pack_state(checkpoint), self.writer.group
        self.writer.submit(lambda: store.save_checkpoint(path, tensors, state, group))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the parameters of a checkpoint folder into the module.

        Returns the rest of the checkpoint.
        """
        self._resume_path = Path(checkpoint_path)
        checkpoint = store.load_state(self._resume_path)
        checkpoint["state_dict"] = weights = self.lightning_module_state_dict()
        store.read_into(self._resume_path, "model", weights)
        assert self.lightning_module is not None
        module_tensors = self.lightning_module.state_dict()
        if len(module_tensors) > len(weights):  # two copies of a tied weight in a V-shaped pipeline
            with torch.no_grad():
                for name, tensor in module_tensors.items():
                    local_tensor(tensor).copy_(local_tensor(weights[self.canonical_name(name)]))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy tensors that a callback has replaced in the loaded state dict."""
        weights = self.lightning_module_state_dict()
        with torch.no_grad():
            for name, tensor in checkpoint["state_dict"].items():
                if tensor is not weights[name]:
                    weights[name].copy_(tensor)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the optimizer state."""
        assert self._resume_path is not None
        shapes = store.tensor_shapes(self._resume_path, "optimizer")
        states = optimizer_state_dict.allocate_state(
            self.optimizers, self._parameter_names(), shapes
        )
        store.read_into(self._resume_path, "optimizer", states)
        optimizer_state_dict.put_state(self.optimizers, self._parameter_names(), states)
        for optimizer, counts in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer_state_dict.set_counts_or_settings(optimizer, counts)

    def teardown(self) -> None:
        """Release the module's wrapper; neither model nor optimizer state is copied to the host.

        Does not wait for the device, whose collectives do not end if another rank has failed.
        """
        self.model = self.lightning_module
        if self._optimizer_in_backward is not None:
            self._optimizer_in_backward.remove_hooks()
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        assert self.lightning_module is not None
        named_parameters = self.lightning_module.named_parameters()
        return {parameter: self.canonical_name(name) for name, parameter in named_parameters}


class OptimizerInBackward:
    """Steps each parameter when its gradient is accumulated, then frees the gradient.

    Each parameter is a parameter group of its own. The regular optimizer step finds no gradients
    and does nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._squared_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._hooks: list[RemovableHandle] = []
        parts: list[Any] = getattr(optimizer, "parts", [optimizer])
        for part in parts:
            for group in part.param_groups:
                (parameter,) = group["params"]
                step = partial(self._step, part, group)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(step))

    def remove_hooks(self) -> None:
        """Remove the hooks: parameters with such hooks are not garbage collected in cycles."""
        for hook in self._hooks:
            hook.remove()

    def take_grad_norm(self) -> Tensor:
        """2-norm of all gradients since the last call, equal on every rank; resets it."""
        square = self._squared_norm.clone()
        self._squared_norm.zero_()
        if dist.is_initialized():
            dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def _step(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._squared_norm += grad_norm.squared_grad_norm(parameter.grad).to(
            self._squared_norm.device
        )
        all_groups, optimizer.param_groups = optimizer.param_groups, [group]
        optimizer.step()
        optimizer.param_groups = all_groups
        parameter.grad = None
