"""What the training module asks of every layout, and how every layout saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.checkpoints import store
from scalewise.checkpoints.writer import BackgroundWriter
from scalewise.measure.memory import StrategyBuffers
from scalewise.models.base import StageSlice, Weight
from scalewise.objectives import ObjectiveConfig
from scalewise.strategies import grad_norm, optimizer_state_dict
from scalewise.strategies.optimizer_in_backward import OptimizerInBackward

if TYPE_CHECKING:
    from scalewise.checkpoints.config import CheckpointConfig
    from scalewise.run_config import RunConfig

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ScaledLoss:
    """The summed loss of a micro batch, times a factor."""

    objective: ObjectiveConfig
    factor: Tensor | float = 1.0

    @property
    def computed_in_module(self) -> bool:
        """Returns whether a module takes the sums over tokens itself."""
        return self.objective.loss_chunk is not None

    def compute(self, module: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a batch."""
        reads = self.computed_in_module or self.objective.needs_encoder_decoder
        labels = batch["labels"] if reads else None
        return self(module(batch["inputs"], labels, batch.get("places")), batch)

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss from what a module returned: logits, or the sums that it took."""
        summed = (
            output
            if self.computed_in_module
            else self.objective.sum_over_tokens(output, batch["labels"])
        )
        return self.objective.loss(grad_norm.local_tensor(summed), batch) * self.factor


class ParallelStrategy(Strategy):
    """A Lightning strategy that also builds the model and knows who holds what of it.

    ``has_sharded_state``: whether ranks hold different tensors, so that all of them write
    checkpoints.
    ``fuses_forward_backward``: whether forward and backward are one call, so that none can time
    them.
    """

    writer: BackgroundWriter
    has_sharded_state = False
    fuses_forward_backward = False
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True
    _resume_path: Path | None = None
    _optimizer_in_backward: OptimizerInBackward | None = None
    _saves_group_settings = False

    def build(self, run: RunConfig) -> nn.Module:
        """Returns what this rank holds of the model, with the weights that ``run.seed`` gives."""
        whole = StageSlice(range(run.model.layers))
        module = run.model.build_meta(whole)
        run.quantization.apply(module, run.model)
        run.precision.apply(module, run.model, run.hardware.device)
        run.adapter.apply(module, run.model)
        module.to_empty(device=torch.get_default_device())
        run.model.init_weights(module, run.seed)
        run.adapter.init_or_load_weights(module, run.model, run.seed)
        run.objective.apply(module, in_forward=run.objective.takes_gradients_in_forward(run))
        run.memory.apply(module, whole)
        run.compile.apply(module)
        return module

    def prepare_user_module(self, run: RunConfig, module: LightningModule) -> None:
        """Makes a module of the user's, built and whole, one of this layout, before it is set up.

        What its optimizer's groups say is kept in checkpoints from then on.
        """
        self._saves_group_settings = True

    def build_optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Returns the run's optimizer over what this rank holds of the model."""
        optimizer = run.optimizer.build(self.iter_weights(run, module))
        if run.optimizer.in_backward:
            self._optimizer_in_backward = OptimizerInBackward(optimizer, self.root_device)
        return optimizer

    def iter_weights(
        self, run: RunConfig, module: nn.Module
    ) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Yields each parameter of a module with the weight of the whole model that it is of."""
        known = {weight.name: weight for weight in run.weight_census()}
        for name, parameter in module.named_parameters():
            yield known[self.canonical_name(f"model.{name}").removeprefix("model.")], parameter

    def shard_batch(self, batch: Batch) -> Batch:
        """Returns this rank's piece of the rows it reads: all of them unless tokens are shared."""
        return batch

    def loss_context(self) -> AbstractContextManager[None]:
        """Returns the context in which losses and their gradients are taken."""
        return nullcontext()

    def compute_train_loss(
        self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool
    ) -> Tensor:
        """Returns the loss of a micro batch on this rank, ready for backward.

        ``last``: no other follows before the optimizer steps.
        """
        batch = self.shard_batch(batch)
        with self.loss_context():
            return loss.compute(module, batch)

    def compute_validation_loss(self, module: nn.Module, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Returns the loss of a micro batch on this rank, without gradients."""
        return self.compute_train_loss(module, batch, loss, last=False)

    @torch.no_grad()
    def call_no_grad(self, method: Callable[..., Tensor], *args: Any) -> Tensor:
        """Returns what a method of the module gives without gradients, called as its steps are."""
        assert self.lightning_module is not None
        with self.precision_plugin.forward_context():
            if self.model is self.lightning_module:
                return method(*args)
            through: Any = self._forward_redirection
            found = through(self.model, self.lightning_module, method.__name__, *args)
            return cast(Tensor, found)

    def clip_grad_norm(self, module: nn.Module, max_norm: float | None) -> Tensor:
        """Scales the whole gradient down to the norm ``max_norm``; returns the norm it had."""
        if self._optimizer_in_backward is not None:
            return self._optimizer_in_backward.take_grad_norm()
        held = [p for p in module.parameters() if p.grad is not None]
        norm = grad_norm.tensors_norm([p.grad for p in held if p.grad is not None])
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(held, max_norm, norm)
        return norm

    def set_backward_callback(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called before each backward pass that Lightning does not see: none
        here."""

    def reshard(self) -> None:
        """Drops gathered copies of shards, which have changed outside of the optimizer."""

    @property
    def resume_path(self) -> Path:
        """Returns the checkpoint that training goes on from, once it is being loaded."""
        assert self._resume_path is not None
        return self._resume_path

    def strategy_buffers(self) -> StrategyBuffers:
        """Returns what this rank holds of the model beside the module's own tensors."""
        return StrategyBuffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the tensors that a checkpoint holds of the model: this rank's, not copied."""
        assert self.lightning_module is not None
        return {
            self.canonical_name(name): tensor.detach()
            for name, tensor in self.lightning_module.state_dict().items()
        }

    def canonical_name(self, name: str) -> str:
        """Returns the name that a tensor of the module has in the whole model, adapted or not."""
        return name.replace(".base_layer.", ".")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what an optimizer counts; tensors go in by name, settings are the run's.

        Those of a user's module are its own: all that its groups say.
        """
        if self._saves_group_settings:
            return {"groups": optimizer_state_dict.group_settings(optimizer)}
        return optimizer_state_dict.step_counts(optimizer)

    def setup_checkpoint_writer(self, checkpoint: CheckpointConfig) -> None:
        """Says how checkpoints are written; every rank calls it, once training is set up."""
        self.writer = BackgroundWriter(
            background=checkpoint.background,
            device=self.root_device,
            collective=self.has_sharded_state,
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder; every rank must call it."""
        model = checkpoint.pop("state_dict")
        average = checkpoint.pop(store.AVERAGE, None)
        if not (self.has_sharded_state or self.is_global_zero):
            return
        states = optimizer_state_dict.state_tensors(self.optimizers, self._parameter_names())
        parts = {"model": model, "optimizer": states}
        if average:
            parts[store.AVERAGE] = average
        tensors = self.writer.stage(parts)
        path, rest, group = Path(filepath), store.pack_state(checkpoint), self.writer.group
        self.writer.submit(lambda: store.save_checkpoint(path, tensors, rest, group))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the weights into the module; returns the rest of a checkpoint folder."""
        self._resume_path = Path(checkpoint_path)
        checkpoint = store.load_state(self._resume_path)
        checkpoint["state_dict"] = held = self.lightning_module_state_dict()
        store.read_into(self._resume_path, "model", held)
        assert self.lightning_module is not None
        module = self.lightning_module.state_dict()
        if len(module) > len(held):  # a folded pipeline has both ends of a tied weight
            with torch.no_grad():
                for name, tensor in module.items():
                    grad_norm.local_tensor(tensor).copy_(
                        grad_norm.local_tensor(held[self.canonical_name(name)])
                    )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copies what a callback put in the place of the weights that are already read."""
        held = self.lightning_module_state_dict()
        with torch.no_grad():
            for name, tensor in checkpoint["state_dict"].items():
                if tensor is not held[name]:
                    held[name].copy_(tensor)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads the optimizer's tensors."""
        assert self._resume_path is not None
        known = store.tensor_shapes(self._resume_path, "optimizer")
        states = optimizer_state_dict.allocate_state(
            self.optimizers, self._parameter_names(), known
        )
        store.read_into(self._resume_path, "optimizer", states)
        optimizer_state_dict.put_state(self.optimizers, self._parameter_names(), states)
        for optimizer, counts in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer_state_dict.set_counts_or_settings(optimizer, counts)

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {parameter: self.canonical_name(name) for name, parameter in named}
