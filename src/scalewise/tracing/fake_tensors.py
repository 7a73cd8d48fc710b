"""Fake tensors and a fake process group, in which code of a training step runs without memory.

All traces and operator graphs use this mode. Operators are those of the CPU, or of a fake CUDA
device if ``fake_cuda`` has loaded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from scalewise.compat.torch import (
    READ_SCALAR_OP,
    DevicelessFakeTensorMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    registered_buffers,
    registered_parameters,
    unset_fake_temporarily,
)
from scalewise.compat.torch_cuda import CudaDevice, replaced_cuda_functions
from scalewise.compat.torch_distributed import (
    clear_sharding_caches,
    gradient_metadata,
    init_fake_process_group,
    replaced_mesh_init,
    replaced_stage_metadata,
    replaced_to_empty,
    uncounted_shape_propagation,
)
from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import ParallelismConfig
from scalewise.precision.config import LightningPrecision
from scalewise.units import GIB

FAKE_DEVICE = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, processors=132)
"""Device that fake CUDA tensors are on."""


class FakeStageChannel:
    """Exchange of tensor metadata between pipeline stages, within one process.

    All stages exchange tensors of the same shape and dtype, so one record serves all of them.
    """

    metadata: Any = None
    """Metadata that a stage has last sent to a later stage."""

    def use(self) -> AbstractContextManager[None]:
        """Context in which pipeline stages use this channel."""

        def send(stage: PipelineStage, metadata: Any, to_stage: int) -> None:
            self.metadata = metadata if to_stage > stage.stage_index else self.metadata

        def receive(stage: PipelineStage, from_stage: int) -> Any:
            return self.metadata if from_stage < stage.stage_index else gradient_metadata(stage)

        return replaced_stage_metadata(send, receive)


@contextmanager
def fake_ranks(config: ParallelismConfig, rank: int, channel: FakeStageChannel) -> Iterator[None]:
    """Make this process rank ``rank`` of a fake process group, whose collectives do nothing.

    Raises:
        RuntimeError: a process group is already initialized.
    """
    if dist.is_initialized():
        raise RuntimeError("a trace requires a process without an initialized process group")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if config.uses_process_group:
        init_fake_process_group(rank, config.world_size)
    try:
        with (
            replaced_mesh_init(_real_device_mesh),
            uncounted_shape_propagation(),
            replaced_to_empty(_to_empty_without_swap),
            channel.use(),
        ):
            yield
    finally:
        if config.uses_process_group:
            dist.destroy_process_group()
        clear_sharding_caches()  # they refer to the destroyed process group
        torch.set_num_threads(threads)


def fake_tensor_mode() -> FakeTensorMode:
    """Mode in which tensors have shape and dtype, but no data."""
    return DevicelessFakeTensorMode(allow_non_fake_inputs=True)


class ReadableScalars(TorchDispatchMode):
    """Answers reads of single elements of fake tensors, which have no values: 1, True or 0.

    Optimizers such as Adafactor scale updates by norms that they read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_SCALAR_OP and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


def fake_device(
    device: DeviceKind, on_wait: Callable[[str], None] = lambda _: None
) -> AbstractContextManager[None]:
    """Context in which a fake CUDA device exists, if ``device`` is one.

    ``on_wait``: function of the name of each call in which the host waits for the device.
    """
    if device is not DeviceKind.cuda:
        return nullcontext()
    return replaced_cuda_functions(FAKE_DEVICE, on_wait)


def replace_tensors(
    module: nn.Module,
    new_parameter: Callable[[nn.Parameter], nn.Parameter],
    new_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Replace the parameters and buffers of a module in place; tied weights stay tied."""
    replaced: dict[int, nn.Parameter] = {}  # by id, so that tied weights stay tied
    with torch.no_grad():
        for owner in module.modules():
            parameters, buffers = registered_parameters(owner), registered_buffers(owner)
            for name, parameter in parameters.items():
                if parameter is not None:
                    if id(parameter) not in replaced:
                        replaced[id(parameter)] = new_parameter(parameter)
                    parameters[name] = replaced[id(parameter)]
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = new_buffer(buffer)


def precision_plugin(name: LightningPrecision, device: DeviceKind) -> Precision:
    """Lightning's precision plugin of a name such as ``bf16-mixed``, as its Trainer chooses it."""
    if name in ("bf16-mixed", "16-mixed"):
        return MixedPrecision(name, device.value)
    return HalfPrecision(name) if name == "bf16-true" else Precision()


def _real_device_mesh(init: Callable[..., None]) -> Callable[..., None]:
    """Constructor of a mesh outside fake mode: it computes with the values of its rank tensor."""

    def init_without_fake_tensors(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            init(*args, **kwargs)

    return init_without_fake_tensors


def _to_empty_without_swap(to_empty: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``to_empty`` without swapping tensors: a fake tensor cannot be swapped with a meta tensor."""

    def replace_by_empty(
        self: nn.Module, *, device: torch.device | str | int | None, recurse: bool = True
    ) -> nn.Module:
        if any(isinstance(part, FSDPModule) for part in self.modules()):
            return to_empty(self, device=device, recurse=recurse)
        replace_tensors(
            self,
            lambda it: nn.Parameter(torch.empty_like(it, device=device), it.requires_grad),
            lambda buffer: torch.empty_like(buffer, device=device),
        )
        return self

    return replace_by_empty
