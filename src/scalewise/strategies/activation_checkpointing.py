"""Activation checkpointing, activation offload and compilation of blocks, in place."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import SEEK_END
from typing import IO, Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scalewise.compat.torch import (
    ATTENTION_OPS,
    VARLEN_ATTENTION_OP,
    is_traceable_wrapper_subclass,
    storage_id,
    tensor_version,
    tree_leaves,
)
from scalewise.compat.torch_distributed import SAVED_COLLECTIVES, AsyncCollectiveTensor
from scalewise.measure.memory import storage_keys
from scalewise.memory_config import OFFLOAD_MIN_BYTES, ActivationCheckpointing, AutoCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.base_module import ModelModule
from scalewise.models.op_graph import Recompute
from scalewise.models.varlen_cpu import varlen_attention_cpu  # noqa: F401 (registers its operator)
from scalewise.torch_compile import Compile, CompileScope

MATMUL_OPS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
SEGMENT_OPS = (torch.ops.scalewise.varlen_attention_cpu,)
SAVED_OPS = (
    frozenset(op.default for op in (*MATMUL_OPS, *ATTENTION_OPS, *SEGMENT_OPS)) | SAVED_COLLECTIVES
)
"""Operators whose results selective checkpointing stores: costly to repeat."""


def apply_checkpointing(
    config: ActivationCheckpointing, module: ModelModule, stage: StageSlice
) -> None:
    """Apply activation checkpointing and offload to the blocks of ``stage``, in place.

    Names and parameters do not change. Raises ``RuntimeError`` for ``memory=auto``, which has to be
    resolved first.
    """
    if isinstance(config, AutoCheckpointing):
        raise RuntimeError("memory=auto has to be resolved before a module is built")
    for recompute, block in zip(config.recompute_per_layer((stage,)), module.layers(), strict=True):
        if recompute is not Recompute.nothing:
            checkpoint_block(block, save_matmuls=recompute is Recompute.selective)
        if config.offload:
            offload_block(block)


def checkpoint_block(block: nn.Module, *, save_matmuls: bool) -> None:
    """Wrap the forward of a block in ``torch.utils.checkpoint``, in place.

    ``save_matmuls``: results of matmuls, attention and collectives are stored and not recomputed
    (selective checkpointing). Module hooks, such as FSDP's, lie outside of the wrapper and run
    once.
    """
    contexts: dict[str, Any] = {}
    if save_matmuls:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _selective_policy)
    forward: Callable[..., Any] = block.forward
    block.forward = partial(checkpoint, forward, use_reentrant=False, **contexts)


def _selective_policy(
    context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> Any:
    saves = op in SAVED_OPS or op.name() == VARLEN_ATTENTION_OP
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


Restore = Callable[[], Tensor]


def offload_block(block: nn.Module) -> None:
    """Offload the tensors that a block saves for the backward pass, in place.

    A CUDA device offloads to pinned host memory, the CPU to an unnamed file in ``TMPDIR``.
    Parameters and tensors that other blocks read as well stay where they are.
    """
    forward: Callable[..., Any] = block.forward

    def offloading_forward(x_BTW: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x_BTW, *args, **kwargs)
        shared = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        offloaded = OffloadedStorages(block, shared)
        with saved_tensors_hooks(offloaded.pack, offloaded.unpack):
            return forward(x_BTW, *args, **kwargs)

    block.forward = offloading_forward


class OffloadedStorages:
    """Storages that one forward pass of a block has offloaded, each of them once."""

    def __init__(self, block: nn.Module, shared: list[Tensor]) -> None:
        self._block, self._shared = block, storage_keys(shared)
        self._offloaded: dict[tuple[int, int], _OffloadedStorage] = {}
        self._file: IO[bytes] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Pack hook of ``saved_tensors_hooks``: a handle that ``unpack`` restores from."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()  # its collective may be in flight
        if is_traceable_wrapper_subclass(wrapper := cast(Any, tensor)):
            names, context = wrapper.__tensor_flatten__()
            parts = {name: getattr(wrapper, name) for name in names}
            inner = {n: self.pack(p) if isinstance(p, Tensor) else p for n, p in parts.items()}
            return _WrappedTensor(type(wrapper), inner, context, tensor.size(), wrapper.stride())
        storage = tensor.untyped_storage()
        if storage.nbytes() < OFFLOAD_MIN_BYTES or storage_id(storage) in self._resident_storages():
            return tensor
        key = (storage_id(storage), tensor_version(tensor))
        if key not in self._offloaded:
            self._offloaded[key] = _OffloadedStorage(self._offload(storage))
            weakref.finalize(storage, self._offloaded.pop, key, None)
        offloaded = self._offloaded[key]
        offloaded.pending_uses += 1
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _StorageView(offloaded, tensor.dtype, view)

    def unpack(self, packed: Any) -> Tensor:
        """Unpack hook of ``saved_tensors_hooks``: the tensor that was packed."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _WrappedTensor):
            inner = {
                name: self.unpack(part)
                if isinstance(part, Tensor | _StorageView | _WrappedTensor)
                else part
                for name, part in packed.inner.items()
            }
            tensor = packed.kind.__tensor_unflatten__(
                inner, packed.context, packed.size, packed.stride
            )
            return cast(Tensor, tensor)
        storage_bytes = packed.storage.take_bytes()
        remainder = len(storage_bytes) % packed.dtype.itemsize
        restored: Tensor = (
            storage_bytes[: len(storage_bytes) - remainder]
            .view(packed.dtype)
            .as_strided(*packed.view)
        )
        return restored

    def _resident_storages(self) -> set[int]:
        """Storages of parameters, as gathered now, and of shared inputs."""
        return storage_keys([*self._block.parameters(), *self._block.buffers()]) | self._shared

    @torch.no_grad()
    def _offload(self, storage: UntypedStorage) -> Restore:
        device, size = storage.device, storage.nbytes()
        if device.type == "meta":  # plans run on the meta device
            return lambda: torch.empty(size, dtype=torch.uint8)
        storage_bytes = _bytes_tensor(storage)
        if device.type == "cuda":
            host = torch.empty(storage_bytes.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(storage_bytes, non_blocking=True)
            return lambda: host.to(device, non_blocking=True)
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the finalizer)
            weakref.finalize(self, self._file.close)
        begin = self._file.seek(0, SEEK_END)
        self._file.write(storage_bytes.numpy().data)
        return lambda: self._read_file(begin, size)

    def _read_file(self, begin: int, size: int) -> Tensor:
        restored = torch.empty(size, dtype=torch.uint8)
        assert self._file is not None
        self._file.seek(begin)
        self._file.readinto(restored.numpy().data)  # type: ignore[attr-defined]  # IO lacks it
        return restored


@dataclass(frozen=True)
class _StorageView:
    """Handle of a tensor in an offloaded storage."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    view: tuple[torch.Size, tuple[int, ...], int]
    """Size, stride and storage offset."""


@dataclass(frozen=True)
class _WrappedTensor:
    """Handle of a tensor subclass, such as DTensor, with packed inner tensors."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _bytes_tensor(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _OffloadedStorage:
    """Offloaded storage that is restored once and freed after its last use."""

    def __init__(self, restore: Restore) -> None:
        self.pending_uses, self._restore = 0, restore
        self._bytes: Tensor | None = None

    def take_bytes(self) -> Tensor:
        """Bytes of the storage, restored at the first call; counts one use."""
        restored = self._restore() if self._bytes is None else self._bytes
        self.pending_uses -= 1
        self._bytes = restored if self.pending_uses else None
        return restored


def compile_module(config: Compile, module: ModelModule) -> None:
    """Compile a module, or each of its blocks, in place; compilation is lazy.

    Only ``forward`` is compiled: ``Module.compile`` falls back to eager mode for blocks with
    activation checkpointing.
    """
    modules: dict[CompileScope, Sequence[nn.Module]] = {
        CompileScope.none: [],
        CompileScope.block: module.layers(),
        CompileScope.whole: [module],
    }
    for target in modules[config.scope]:
        target.forward = torch.compile(
            target.forward, backend=config.backend.value, dynamic=config.dynamic
        )
