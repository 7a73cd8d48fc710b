"""Activation offload: what a block keeps for backward leaves the device until it is read."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from os import SEEK_END
from typing import IO, Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from scalewise.activation_checkpointing import OFFLOAD_MIN_BYTES
from scalewise.measure.storages import storage_keys

Restore = Callable[[], Tensor]


def offload_block(block: nn.Module) -> None:
    """Makes a block hand over what it keeps for backward, in place: to the host, or to the disk.

    From a CUDA device to pinned memory of its host, and from the CPU to a file without a name, in
    ``TMPDIR``. Weights stay where they are, and so does what other blocks read too.
    """
    forward: Callable[..., Any] = block.forward

    def handing_over(x_BTW: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x_BTW, *arguments, **keywords)
        shared = [it for it in tree_leaves((arguments, keywords)) if isinstance(it, Tensor)]
        away = OffloadedStorages(block, shared)
        with saved_tensors_hooks(away.pack, away.unpack):
            return forward(x_BTW, *arguments, **keywords)

    block.forward = handing_over


class OffloadedStorages:
    """What one pass of a block has handed over: each storage once, however many views are kept."""

    def __init__(self, block: nn.Module, shared: list[Tensor]) -> None:
        self._block, self._shared = block, storage_keys(shared)
        self._offloaded: dict[tuple[int, int], _OffloadedStorage] = {}
        self._file: IO[bytes] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Returns what ``unpack`` makes the tensor of again."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()  # its numbers may still be on their way
        if is_traceable_wrapper_subclass(around := cast(Any, tensor)):
            names, context = around.__tensor_flatten__()
            parts = {name: getattr(around, name) for name in names}
            inner = {n: self.pack(p) if isinstance(p, Tensor) else p for n, p in parts.items()}
            return _WrappedTensor(type(around), inner, context, tensor.size(), around.stride())
        storage = tensor.untyped_storage()
        if storage.nbytes() < OFFLOAD_MIN_BYTES or storage._cdata in self._resident_storages():
            return tensor
        key = (storage._cdata, tensor._version)
        if key not in self._offloaded:
            self._offloaded[key] = _OffloadedStorage(self._offload(storage))
            weakref.finalize(storage, self._offloaded.pop, key, None)
        kept = self._offloaded[key]
        kept.pending_uses += 1
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _StorageView(kept, tensor.dtype, view)

    def unpack(self, packed: Any) -> Tensor:
        """Returns a tensor like the one that was ``packed``."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _WrappedTensor):
            inner = {
                name: self.unpack(part)
                if isinstance(part, Tensor | _StorageView | _WrappedTensor)
                else part
                for name, part in packed.inner.items()
            }
            made = packed.kind.__tensor_unflatten__(
                inner, packed.context, packed.size, packed.stride
            )
            return cast(Tensor, made)
        whole = packed.storage.take_bytes()
        rest = len(whole) % packed.dtype.itemsize
        found: Tensor = whole[: len(whole) - rest].view(packed.dtype).as_strided(*packed.view)
        return found

    def _resident_storages(self) -> set[int]:
        """Returns the storages of weights, wherever they have been gathered, and of the shared."""
        return storage_keys([*self._block.parameters(), *self._block.buffers()]) | self._shared

    @torch.no_grad()
    def _offload(self, storage: UntypedStorage) -> Restore:
        device, size = storage.device, storage.nbytes()
        if device.type == "meta":  # no memory is behind it, and a plan runs it
            return lambda: torch.empty(size, dtype=torch.uint8)
        whole = _bytes_tensor(storage)
        if device.type == "cuda":
            host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(whole, non_blocking=True)
            return lambda: host.to(device, non_blocking=True)
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this)
            weakref.finalize(self, self._file.close)
        begin = self._file.seek(0, SEEK_END)
        self._file.write(whole.numpy().data)
        return lambda: self._read_file(begin, size)

    def _read_file(self, begin: int, size: int) -> Tensor:
        back = torch.empty(size, dtype=torch.uint8)
        assert self._file is not None
        self._file.seek(begin)
        self._file.readinto(back.numpy().data)  # type: ignore[attr-defined]  # IO lacks it
        return back


@dataclass(frozen=True)
class _StorageView:
    """A tensor of a storage that is away: its format, and size, stride and offset."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    view: tuple[torch.Size, tuple[int, ...], int]


@dataclass(frozen=True)
class _WrappedTensor:
    """A tensor around others, as of a mesh, and what is needed to put it around them again."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _bytes_tensor(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _OffloadedStorage:
    """A storage that is away, until the last that needs it has been given it."""

    def __init__(self, restore: Restore) -> None:
        self.pending_uses, self._restore = 0, restore
        self._bytes: Tensor | None = None

    def take_bytes(self) -> Tensor:
        """Returns what the storage holds, brought back by the first who asks."""
        whole = self._restore() if self._bytes is None else self._bytes
        self.pending_uses -= 1
        self._bytes = whole if self.pending_uses else None
        return whole
