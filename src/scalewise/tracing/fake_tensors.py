"""Fake tensors and a fake process group, in which code of a training step runs without memory.

All traces and operator graphs use this mode. Operators are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _derive_grad_metas,
    _StageBackwardMeta,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from scalewise.precision.config import LightningPrecision

_mesh_init = DeviceMesh.__init__
_propagate = ShardingPropagator._propagate_tensor_meta_non_cached
_to_empty = nn.Module.to_empty


class FakeStageChannel:
    """Exchange of tensor metadata between pipeline stages, within one process.

    All stages exchange tensors of the same shape and dtype, so one record serves all of them.
    """

    metadata: Any = None
    """Metadata that a stage has last sent to a later stage."""

    def iter_patches(self) -> Iterator[Any]:
        """Patches of torch that make pipeline stages use this channel."""

        def send(stage: PipelineStage, metadata: Any, to_stage: int) -> None:
            self.metadata = metadata if to_stage > stage.stage_index else self.metadata

        def receive(stage: PipelineStage, from_stage: int) -> Any:
            if from_stage < stage.stage_index:
                return self.metadata
            outputs = stage._stage_meta.outputs
            assert outputs is not None
            return _StageBackwardMeta(_derive_grad_metas(outputs))

        yield patch.object(_PipelineSchedule, "_warmup_p2p", _without_metadata_exchange)
        yield patch.object(PipelineStage, "_send_meta", send)
        yield patch.object(PipelineStage, "_recv_meta", receive)


def _without_metadata_exchange(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
    """Select dynamic inference without the collective vote, which reads tensor data."""
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC


@contextmanager
def fake_ranks(world_size: int, rank: int, channel: FakeStageChannel) -> Iterator[None]:
    """Make this process rank ``rank`` of a fake process group, whose collectives do nothing.

    Raises:
        RuntimeError: a process group is already initialized.
    """
    if dist.is_initialized():
        raise RuntimeError("a trace requires a process without an initialized process group")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as patches:
            for owner, name, replacement in (
                (DeviceMesh, "__init__", _real_device_mesh),
                (
                    ShardingPropagator,
                    "_propagate_tensor_meta_non_cached",
                    _without_shape_propagation,
                ),
                (nn.Module, "to_empty", _to_empty_without_swap),
            ):
                patches.enter_context(patch.object(owner, name, replacement))
            for patched in channel.iter_patches():
                patches.enter_context(patched)
            yield
    finally:
        if world_size > 1:
            dist.destroy_process_group()
        # These caches refer to the destroyed process group.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
        torch.set_num_threads(threads)


def fake_tensor_mode() -> FakeTensorMode:
    """Mode in which tensors have shape and dtype, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def replace_tensors(
    module: nn.Module,
    new_parameter: Callable[[nn.Parameter], nn.Parameter],
    new_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Replace the parameters and buffers of a module in place; tied weights stay tied."""
    replaced: dict[int, nn.Parameter] = {}  # by id, so that tied weights stay tied
    with torch.no_grad():
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = new_parameter(parameter)
                    owner._parameters[name] = replaced[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = new_buffer(buffer)


def precision_plugin(name: LightningPrecision) -> Precision:
    """Lightning's precision plugin of a name such as ``bf16-mixed``, as its Trainer chooses it."""
    if name == "bf16-mixed":
        return MixedPrecision(name, "cpu")
    return HalfPrecision(name) if name == "bf16-true" else Precision()


def _real_device_mesh(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """Build a mesh outside fake mode: it computes with the values of its rank tensor."""
    with unset_fake_temporarily():
        _mesh_init(self, *args, **kwargs)


def _without_shape_propagation(self: ShardingPropagator, schema: Any) -> Any:
    """Propagate shapes outside the active modes, so that DTensor's extra run is not counted."""
    with _disable_current_modes():
        return _propagate(self, schema)


def _to_empty_without_swap(
    self: nn.Module, *, device: torch.device | str | int | None, recurse: bool = True
) -> nn.Module:
    """``to_empty`` without swapping tensors: a fake tensor cannot be swapped with a meta tensor."""
    if any(isinstance(part, FSDPModule) for part in self.modules()):
        return _to_empty(self, device=device, recurse=recurse)
    replace_tensors(
        self,
        lambda it: nn.Parameter(torch.empty_like(it, device=device), it.requires_grad),
        lambda buffer: torch.empty_like(buffer, device=device),
    )
    return self
