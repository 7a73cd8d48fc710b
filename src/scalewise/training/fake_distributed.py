"""Tensors with no memory behind them, on ranks that are not there: what a trace runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
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

_mesh_init = DeviceMesh.__init__
_propagate = ShardingPropagator._propagate_tensor_meta_non_cached
_to_empty = nn.Module.to_empty


class FakeStageChannel:
    """What the stages of a pipeline tell each other of the tensors between them.

    Between any two it is the same: what the first stage says, the stages of other ranks hear.
    """

    metadata: Any = None

    def iter_patches(self) -> Iterator[Any]:
        """Yields what is changed in torch for stages that talk over this wire."""

        def send(stage: PipelineStage, said: Any, to_stage: int) -> None:
            self.metadata = said if to_stage > stage.stage_index else self.metadata

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
    """The stages would vote on how to learn of each other's tensors, and read the numbers."""
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC


@contextmanager
def fake_ranks(world_size: int, rank: int, channel: FakeStageChannel) -> Iterator[None]:
    """Makes this process one of ``world_size`` ranks; collectives among them do nothing.

    Raises ``RuntimeError`` inside ranks that are really there.
    """
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process without a process group")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as patches:
            for owner, name, made in (
                (DeviceMesh, "__init__", _real_device_mesh),
                (
                    ShardingPropagator,
                    "_propagate_tensor_meta_non_cached",
                    _without_shape_propagation,
                ),
                (nn.Module, "to_empty", _to_empty_without_swap),
            ):
                patches.enter_context(patch.object(owner, name, made))
            for patched in channel.iter_patches():
                patches.enter_context(patched)
            yield
    finally:
        if world_size > 1:
            dist.destroy_process_group()
        # What these hold names groups that are gone.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
        torch.set_num_threads(threads)


def fake_tensor_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have shapes and formats, and no numbers."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _real_device_mesh(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
    """A mesh computes with its ranks' numbers."""
    with unset_fake_temporarily():
        _mesh_init(self, *args, **kwargs)


def _without_shape_propagation(self: ShardingPropagator, schema: Any) -> Any:
    """DTensor runs each operator once more on whole shapes to learn them: nobody counts these."""
    with _disable_current_modes():
        return _propagate(self, schema)


def _to_empty_without_swap(
    self: nn.Module, *, device: torch.device | str | int | None, recurse: bool = True
) -> nn.Module:
    """``to_empty`` without swapping: a fake tensor cannot be swapped with one on ``meta``."""
    if any(isinstance(part, FSDPModule) for part in self.modules()):
        return _to_empty(self, device=device, recurse=recurse)
    made: dict[int, Any] = {}  # tied weights stay tied
    with torch.no_grad():
        for part in self.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        empty = torch.empty_like(parameter, device=device)
                        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                    part._parameters[name] = made[id(parameter)]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = torch.empty_like(buffer, device=device)
    return self
