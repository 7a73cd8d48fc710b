"""Pipeline parallelism over torch's schedules: forward and backward are one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

from scalewise.parallelism.mesh import MeshConfig
from scalewise.strategies import grad_norm
from scalewise.strategies.base import Batch, ScaledLoss

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

FORWARD = (
    schedules.FORWARD,
    schedules.SEND_F,
    schedules.RECV_F,
    schedules.UNSHARD,
    schedules.RESHARD,
)
"""What a schedule does to evaluate."""


class ScheduledStage(PipelineStage):
    """A stage that says when it is about to take a piece backward."""

    before_backward: Callable[[], None]

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Takes a piece backward."""
        self.before_backward()
        super().backward_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Runs one backward pass of a micro-batch, for inputs, for weights or for both.

        A split backward finds weight gradients by the identity of ``submod.parameters()``. FSDP
        puts sharded parameters there after a block's forward, and those are not in the autograd
        graph, so that their gradients would be dropped.
        """
        if backward_type != "full":
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class PipelineRunner:
    """This rank's stages, and the schedule that drives them with those of the other ranks.

    A tied embedding lies on the first stage and on the last; the gradients of both are
    added up.
    """

    def __init__(
        self,
        spec: MeshConfig,
        mesh: DeviceMesh,
        indices: Sequence[int],
        modules: Sequence[nn.Module],
        run: RunConfig,
    ) -> None:
        self._spec, self._group = spec, mesh.get_group()
        self._indices, self._modules = tuple(indices), list(modules)
        self._has_first_stage, self._has_last_stage = 0 in indices, spec.num_stages - 1 in indices
        self._loss: ScaledLoss | None = None
        self._losses: list[Tensor] = []
        self.before_backward: Callable[[], None] = lambda: None
        self._schedules: dict[bool, Any] = {}
        self._accumulation = run.accumulation
        self._tied_names = run.model.tied_weights
        self._tied: list[nn.Parameter] = []
        self._tied_copy_ids: set[int] = set()
        ends = dist.get_process_group_ranks(self._group)
        self._end_ranks = [ends[0], ends[0] if spec.pipeline_schedule.is_v_shaped else ends[-1]]
        self._ends_group = self._build_ends_group() if self._tied_names else None

    def _build_ends_group(self) -> dist.ProcessGroup | None:
        """Returns the group of the ranks with the first and the last stage, if this is one."""
        if self._end_ranks[0] == self._end_ranks[1]:
            return None
        own, apart = None, self._end_ranks[1] - self._end_ranks[0]
        for first in range(dist.get_world_size() - apart):  # the pipeline is the outermost axis
            group = dist.new_group(ends := [first, first + apart])
            if dist.get_rank() in ends:
                own = group
        return own

    def find_tied_parameters(self) -> None:
        """Looks up the tied parameters, once they are those that the optimizer moves."""
        self._tied = [
            parameter
            for index, module in zip(self._indices, self._modules, strict=True)
            if index in (0, self._spec.num_stages - 1)
            for name, parameter in module.named_parameters()
            if name in self._tied_names
        ]
        kept = len(self._tied) // 2 if self._has_last_stage else len(self._tied)
        self._tied_copy_ids = {
            id(parameter) for parameter in self._tied[kept if self._has_first_stage else 0 :]
        }

    def is_owned(self, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter counts here: a tied one counts on the first stage."""
        return id(parameter) not in self._tied_copy_ids

    def compute_train_loss(self, batch: Batch, loss: ScaledLoss, *, last: bool) -> Tensor:
        """Returns the loss of a micro batch, on every rank, with its gradients added up."""
        parts = self._accumulation  # Lightning divides the loss that it goes backward from

        divided = replace(loss, factor=loss.factor / parts)
        total = self._run_schedule(batch, divided, backward=True).mul_(parts)
        if last:
            self._reduce_tied_gradients()
        return total.requires_grad_()

    def compute_validation_loss(self, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Returns the loss of a micro batch on every rank, without gradients."""
        return self._run_schedule(batch, loss, backward=False)

    def receive_buffers(self) -> list[Tensor]:
        """Returns the buffers into which stages receive activations and their gradients."""
        if True not in self._schedules:
            return []
        schedule = self._schedules[True]
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        found = [
            info.buffer
            for stage in stages
            for held in (stage.args_recv_info, stage.grad_recv_info)
            for infos in held.values()
            for info in infos
        ]
        return [buffer for buffer in found if isinstance(buffer, Tensor)]

    def _run_schedule(self, batch: Batch, loss: ScaledLoss, *, backward: bool) -> Tensor:
        self._loss = loss
        if backward not in self._schedules:
            self._schedules[backward] = self._build_schedule(batch["inputs"].device, backward)
        schedule = self._schedules[backward]
        losses: list[Tensor] = []
        inputs = (batch["inputs"].contiguous(),) if self._has_first_stage else ()
        labels = batch["labels"].contiguous()
        told: dict[str, Any] = {"target": labels, "losses": losses} if self._has_last_stage else {}
        if self._has_last_stage and loss.computed_in_module:
            told["labels_BT"] = labels
        if "places" in batch:
            told["places_BS"] = batch["places"]
        call = schedule.step if backward else schedule.eval
        call(*inputs, **told, return_outputs=False)
        room = torch.zeros(
            len(loss.objective.metric_keys), dtype=torch.float32
        )  # bf16_true has another
        total = room.to(batch["inputs"].device)
        if losses:  # before the first piece the schedule tries the loss out
            total = torch.stack(self._losses[-len(losses) :]).sum(0, dtype=torch.float32)
        self._losses.clear()
        dist.all_reduce(total, group=self._group)
        return total

    def _build_schedule(self, device: torch.device, backward: bool) -> Any:
        stages = [
            ScheduledStage(module, index, self._spec.num_stages, device, group=self._group)
            for index, module in zip(self._indices, self._modules, strict=True)
        ]
        for stage in stages:
            stage.before_backward = lambda: self.before_backward()
        kind = schedules.get_schedule_class(self._spec.pipeline_schedule.value)
        held: Any = stages if self._spec.pipeline_schedule.is_interleaved else stages[0]
        made: Any = kind(
            held,
            self._spec.num_pipeline_micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,
        )
        if not backward and self._spec.pipeline_schedule.is_interleaved:
            # Zero-bubble schedules ask for gradients even in eval(); forward actions suffice.
            made.pipeline_order_with_comms = {
                rank: [action for action in actions if action.computation_type in FORWARD]
                for rank, actions in made.pipeline_order_with_comms.items()
            }
        return made

    def _micro_batch_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._loss is not None
        measured = self._loss(logits, {"labels": labels})
        self._losses.append(measured.detach().view(-1))
        return measured[0] if measured.dim() else measured

    def _reduce_tied_gradients(self) -> None:
        """Adds up the gradients of a weight that the first and the last stage both use."""
        if not self._tied:
            return
        gradients = [grad_norm.local_tensor(p.grad) for p in self._tied if p.grad is not None]
        if self._ends_group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self._ends_group)
        elif self._has_first_stage and self._has_last_stage:
            half = len(gradients) // 2
            for one, other in zip(gradients[:half], gradients[half:], strict=True):
                other.copy_(one.add_(other))
