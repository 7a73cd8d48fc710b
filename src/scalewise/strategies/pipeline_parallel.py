"""Pipeline parallelism with torch's schedules, which run forward and backward in one call."""

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

from scalewise.compat.torch_distributed import schedule_stages
from scalewise.models.decoder.moe import find_mixtures
from scalewise.models.init import local_tensor
from scalewise.parallelism.mesh import MeshConfig
from scalewise.strategies.base import Batch, ScaledLoss

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

EVAL_ACTIONS = (
    schedules.FORWARD,
    schedules.SEND_F,
    schedules.RECV_F,
    schedules.UNSHARD,
    schedules.RESHARD,
)
"""Schedule actions of an evaluation."""


class ScheduledStage(PipelineStage):
    """Pipeline stage with a callback before each backward pass of a micro-batch."""

    before_backward: Callable[[], None]
    _has_run = False

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch; the first one resets the loads of experts.

        Until then, they count tokens by which torch has inferred shapes.
        """
        if not self._has_run:
            self._has_run = True
            for mixture in find_mixtures(self.submod):
                mixture.reset_counts()
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of one micro-batch."""
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
    """Stages of this rank, and the schedule that runs them with the stages of other ranks.

    A tied embedding has a copy on the first and on the last stage; gradients of the copies are
    summed.
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
        self._lengths: dict[bool, int] = {}
        self._tied_names = run.model.tied_weights
        self._tied: list[nn.Parameter] = []
        self._tied_copy_ids: set[int] = set()
        ends = dist.get_process_group_ranks(self._group)
        self._end_ranks = [ends[0], ends[0] if spec.pipeline_schedule.is_v_shaped else ends[-1]]
        self._ends_group = self._build_ends_group() if self._tied_names else None

    def _build_ends_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks with first and last stage; None on other ranks."""
        if self._end_ranks[0] == self._end_ranks[1]:
            return None
        ends_group, distance = None, self._end_ranks[1] - self._end_ranks[0]
        for first_rank in range(
            dist.get_world_size() - distance
        ):  # the pipeline is the outermost axis
            group = dist.new_group(ends := [first_rank, first_rank + distance])
            if dist.get_rank() in ends:
                ends_group = group
        return ends_group

    def find_tied_parameters(self) -> None:
        """Find the tied parameters; called when the optimizer's parameters are final."""
        self._tied = [
            parameter
            for index, module in zip(self._indices, self._modules, strict=True)
            if index in (0, self._spec.num_stages - 1)
            for name, parameter in module.named_parameters()
            if name in self._tied_names
        ]
        num_first_stage = len(self._tied) // 2 if self._has_last_stage else len(self._tied)
        self._tied_copy_ids = {
            id(parameter)
            for parameter in self._tied[num_first_stage if self._has_first_stage else 0 :]
        }

    def is_owned(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter counts on this rank; a tied one counts on the first stage."""
        return id(parameter) not in self._tied_copy_ids

    def compute_train_loss(self, batch: Batch, loss: ScaledLoss, *, last: bool) -> Tensor:
        """Compute the loss of a micro-batch, equal on every rank, and accumulate gradients.

        ``last``: no other micro-batch follows before the optimizer step.
        """
        # Lightning divides the loss before it runs backward; here, the schedule runs backward.
        scaled_loss = replace(loss, factor=loss.factor / loss.accumulation)
        total = self._run_schedule(batch, scaled_loss, backward=True).mul_(loss.accumulation)
        if last:
            self._reduce_tied_gradients()
        return total.requires_grad_()

    def compute_validation_loss(self, batch: Batch, loss: ScaledLoss) -> Tensor:
        """Compute the loss of a micro-batch, equal on every rank, without gradients."""
        return self._run_schedule(batch, loss, backward=False)

    def receive_buffers(self) -> list[Tensor]:
        """Buffers in which stages receive activations and their gradients."""
        if True not in self._schedules:
            return []
        stages: list[Any] = schedule_stages(self._schedules[True])
        buffers = [
            info.buffer
            for stage in stages
            for recv_infos in (stage.args_recv_info, stage.grad_recv_info)
            for infos in recv_infos.values()
            for info in infos
        ]
        return [buffer for buffer in buffers if isinstance(buffer, Tensor)]

    def _run_schedule(self, batch: Batch, loss: ScaledLoss, *, backward: bool) -> Tensor:
        self._loss = loss
        length = batch["labels"].shape[1]
        if self._lengths.get(backward) != length:
            # The buffers in which a stage receives activations have the shape of its first batch.
            self._schedules[backward] = self._build_schedule(batch["inputs"].device, backward)
            self._lengths[backward] = length
        schedule = self._schedules[backward]
        losses: list[Tensor] = []
        inputs = (batch["inputs"].contiguous(),) if self._has_first_stage else ()
        labels = batch["labels"].contiguous()
        step_kwargs: dict[str, Any] = (
            {"target": labels, "losses": losses} if self._has_last_stage else {}
        )
        if self._has_last_stage and loss.computed_in_module:
            step_kwargs["labels_BT"] = labels
        if "positions" in batch:
            step_kwargs["positions_BS"] = batch["positions"]
        run_schedule = schedule.step if backward else schedule.eval
        run_schedule(*inputs, **step_kwargs, return_outputs=False)
        # fp32 explicitly: with bf16_true, the default dtype is bf16.
        num_metrics, device = len(loss.objective.metric_keys), batch["inputs"].device
        total = torch.zeros(num_metrics, dtype=torch.float32, device=device)
        if losses:  # self._losses may start with a call for shape inference
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
        schedule_class = schedules.get_schedule_class(self._spec.pipeline_schedule.value)
        schedule_stages: Any = stages if self._spec.pipeline_schedule.is_interleaved else stages[0]
        schedule: Any = schedule_class(
            schedule_stages,
            self._spec.num_pipeline_micro_batches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,
        )
        if not backward and self._spec.pipeline_schedule.is_interleaved:
            # Zero-bubble schedules run backward actions even in eval().
            schedule.pipeline_order_with_comms = {
                rank: [action for action in actions if action.computation_type in EVAL_ACTIONS]
                for rank, actions in schedule.pipeline_order_with_comms.items()
            }
        return schedule

    def _micro_batch_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._loss is not None
        loss = self._loss(logits, {"labels": labels})
        self._losses.append(loss.detach().view(-1))
        return loss[0] if loss.dim() else loss

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied parameters over the first and the last stage."""
        if not self._tied:
            return
        gradients = [local_tensor(p.grad) for p in self._tied if p.grad is not None]
        if self._ends_group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self._ends_group)
        elif self._has_first_stage and self._has_last_stage:
            half = len(gradients) // 2
            for first, last in zip(gradients[:half], gradients[half:], strict=True):
                last.copy_(first.add_(last))
