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
    def in_module(self) -> bool:
        """Returns whether a module takes the sums over tokens itself."""
        return self.objective.loss_chunk is not None

    def of(self, module: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a batch."""
        reads = self.in_module or self.objective.encodes
        labels = batch["labels"] if reads else None
        return self(module(batch["inputs"], labels, batch.get("places")), batch)

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss from what a module returned: logits, or the sums that it took."""
        summed = output if self.in_module else self.objective.summed(output, batch["labels"])
        return self.objective.loss(grad_norm.local_tensor(summed), batch) * self.factor


class ParallelStrategy(Strategy):
    """A Lightning strategy that also builds the model and knows who holds what of it.

    ``shared_out``: whether ranks hold different tensors, so that all of them write checkpoints.
    ``joint_passes``: whether forward and backward are one call, so that none can time them.
    """

    writer: BackgroundWriter
    shared_out = False
    joint_passes = False
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True
    _resumed: Path | None = None
    _in_backward: OptimizerInBackward | None = None
    _keeps_settings = False

    def build(self, run: RunConfig) -> nn.Module:
        """Returns what this rank holds of the model, with the weights that ``run.seed`` gives."""
        whole = StageSlice(range(run.model.layers))
        module = run.model.shape(whole)
        run.quantization.apply(module, run.model)
        run.precision.apply(module, run.model, run.hardware.device)
        run.adapter.apply(module, run.model)
        module.to_empty(device=torch.get_default_device())
        run.model.fill(module, run.seed)
        run.adapter.start(module, run.model, run.seed)
        run.objective.apply(module, in_forward=run.objective.in_forward(run))
        run.memory.apply(module, whole)
        run.compile.apply(module)
        return module

    def adopt(self, run: RunConfig, module: LightningModule) -> None:
        """Makes a module of the user's, built and whole, one of this layout, before it is set up.

        What its optimizer's groups say is kept in checkpoints from then on.
        """
        self._keeps_settings = True

    def optimizer(self, run: RunConfig, module: nn.Module) -> Optimizer:
        """Returns the run's optimizer over what this rank holds of the model."""
        optimizer = run.optimizer.build(self.weights(run, module))
        if run.optimizer.in_backward:
            self._in_backward = OptimizerInBackward(optimizer, self.root_device)
        return optimizer

    def weights(self, run: RunConfig, module: nn.Module) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Yields each parameter of a module with the weight of the whole model that it is of."""
        known = {weight.name: weight for weight in run.census()}
        for name, parameter in module.named_parameters():
            yield known[self.canonical(f"model.{name}").removeprefix("model.")], parameter

    def cut(self, batch: Batch) -> Batch:
        """Returns this rank's piece of the rows it reads: all of them unless tokens are shared."""
        return batch

    def loss_context(self) -> AbstractContextManager[None]:
        """Returns the context in which losses and their gradients are taken."""
        return nullcontext()

    def train(self, module: nn.Module, batch: Batch, loss: ScaledLoss, *, last: bool) -> Tensor:
        """Returns the loss of a micro batch on this rank, ready for backward.

        ``last``: no other follows before the optimizer steps.
        """
        batch = self.cut(batch)
        with self.loss_context():
            return loss.of(module, batch)

    def evaluate(self, module: nn.Module, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Returns the loss of a micro batch on this rank, without gradients."""
        return self.train(module, batch, loss, last=False)

    @torch.no_grad()
    def ask(self, question: Callable[..., Tensor], *args: Any) -> Tensor:
        """Returns what a method of the module gives without gradients, called as its steps are."""
        assert self.lightning_module is not None
        with self.precision_plugin.forward_context():
            if self.model is self.lightning_module:
                return question(*args)
            through: Any = self._forward_redirection
            found = through(self.model, self.lightning_module, question.__name__, *args)
            return cast(Tensor, found)

    def clip(self, module: nn.Module, limit: float | None) -> Tensor:
        """Scales the whole gradient down to the norm ``limit``; returns the norm it had."""
        if self._in_backward is not None:
            return self._in_backward.norm()
        held = [p for p in module.parameters() if p.grad is not None]
        norm = grad_norm.tensors_norm([p.grad for p in held if p.grad is not None])
        if limit is not None:
            nn.utils.clip_grads_with_norm_(held, limit, norm)
        return norm

    def watch_backward(self, call: Callable[[], None]) -> None:
        """Has ``call`` called before each backward pass that Lightning does not see: none here."""

    def discard_gathered(self) -> None:
        """Drops gathered copies of shards, which have changed outside of the optimizer."""

    @property
    def resumed(self) -> Path:
        """Returns the checkpoint that training goes on from, once it is being loaded."""
        assert self._resumed is not None
        return self._resumed

    def holdings(self) -> StrategyBuffers:
        """Returns what this rank holds of the model beside the module's own tensors."""
        return StrategyBuffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the tensors that a checkpoint holds of the model: this rank's, not copied."""
        assert self.lightning_module is not None
        return {
            self.canonical(name): tensor.detach()
            for name, tensor in self.lightning_module.state_dict().items()
        }

    def canonical(self, name: str) -> str:
        """Returns the name that a tensor of the module has in the whole model, adapted or not."""
        return name.replace(".base_layer.", ".")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what an optimizer counts; tensors go in by name, settings are the run's.

        Those of a user's module are its own: all that its groups say.
        """
        if self._keeps_settings:
            return {"groups": optimizer_state_dict.group_settings(optimizer)}
        return optimizer_state_dict.step_counts(optimizer)

    def prepare_saving(self, checkpoint: CheckpointConfig) -> None:
        """Says how checkpoints are written; every rank calls it, once training is set up."""
        self.writer = BackgroundWriter(
            background=checkpoint.background, device=self.root_device, shared=self.shared_out
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder; every rank must call it."""
        model = checkpoint.pop("state_dict")
        average = checkpoint.pop(store.AVERAGE, None)
        if not (self.shared_out or self.is_global_zero):
            return
        states = optimizer_state_dict.state_tensors(self.optimizers, self._names())
        parts = {"model": model, "optimizer": states}
        if average:
            parts[store.AVERAGE] = average
        tensors = self.writer.staged(parts)
        path, rest, group = Path(filepath), store.pack_state(checkpoint), self.writer.group
        self.writer.submit(lambda: store.save_checkpoint(path, tensors, rest, group))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the weights into the module; returns the rest of a checkpoint folder."""
        self._resumed = Path(checkpoint_path)
        checkpoint = store.load_state(self._resumed)
        checkpoint["state_dict"] = held = self.lightning_module_state_dict()
        store.read_into(self._resumed, "model", held)
        assert self.lightning_module is not None
        module = self.lightning_module.state_dict()
        if len(module) > len(held):  # a folded pipeline has both ends of a tied weight
            with torch.no_grad():
                for name, tensor in module.items():
                    grad_norm.local_tensor(tensor).copy_(
                        grad_norm.local_tensor(held[self.canonical(name)])
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
        assert self._resumed is not None
        known = store.tensor_shapes(self._resumed, "optimizer")
        states = optimizer_state_dict.allocate_state(self.optimizers, self._names(), known)
        store.read_into(self._resumed, "optimizer", states)
        optimizer_state_dict.put_state(self.optimizers, self._names(), states)
        for optimizer, counts in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer_state_dict.set_counts_or_settings(optimizer, counts)

    def _names(self) -> dict[nn.Parameter, str]:
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {parameter: self.canonical(name) for name, parameter in named}
