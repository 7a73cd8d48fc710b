"""Offload of the tensors that blocks save for backward: to pinned host memory, on the CPU to disk.

On CUDA the copies run on a stream of their own. A block's tensors are copied to the host while the
next block runs forward, and copied back while the next block runs backward; the host never waits.
The last block is not copied unless another forward pass comes before its backward.
"""

from __future__ import annotations

import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import SEEK_END
from typing import IO, Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from scalewise.compat.torch import (
    CAST_OP,
    TorchDispatchMode,
    has_no_values,
    is_traceable_wrapper_subclass,
    storage_id,
    tensor_version,
    tree_leaves,
)
from scalewise.compat.torch_distributed import AsyncCollectiveTensor
from scalewise.hardware import DeviceKind
from scalewise.measure.allocated_bytes import iter_plain_tensors, storage_key, storage_keys
from scalewise.memory_config import OFFLOAD_MIN_BYTES
from scalewise.models.autocast import uses_autocast
from scalewise.models.op_graph import Recompute
from scalewise.strategies.pinned_memory import HostBytes, PinnedMemory, SideCopies


def offload_blocks(
    blocks: Sequence[nn.Module], recompute_modes: Sequence[Recompute], device: DeviceKind
) -> None:
    """Offload the tensors that blocks save for the backward pass, in place.

    A CUDA device offloads to pinned host memory, the CPU to an unnamed file in ``TMPDIR``.
    Parameters and tensors that other blocks read as well stay where they are. Casts of parameters
    are not stored but computed again.

    Args:
        blocks: Blocks that run one after the other, with activation checkpointing if they have it.
        recompute_modes: What the backward pass recomputes in each of them.
        device: Kind of device that runs them.
    """
    offload = _BlockOffload(device)
    for index, (recompute, block) in enumerate(zip(recompute_modes, blocks, strict=True)):
        offload.wrap(block, is_first=index == 0, saves_casts=recompute is Recompute.nothing)


class _BlockOffload:
    """Offload of blocks that run one after the other."""

    def __init__(self, device: DeviceKind) -> None:
        self._memory = PinnedMemory() if device is DeviceKind.cuda else None
        self._last: TensorsInPinnedMemory | None = None

    def wrap(self, block: nn.Module, *, is_first: bool, saves_casts: bool) -> None:
        """Wrap the forward of a block.

        Args:
            block: Block to wrap.
            is_first: Whether a forward pass starts with it.
            saves_casts: Whether it saves the casts of autocast.
        """
        forward: Callable[..., Any] = block.forward

        def offloading_forward(x_BTW: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(x_BTW, *args, **kwargs)
            shared = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
            previous = self._last
            saved: SavedTensors = TensorsOnDisk(block, shared)
            if self._memory is not None:
                saved = self._last = TensorsInPinnedMemory(
                    block, shared, self._memory, None if is_first else previous
                )
            if previous is not None:
                previous.begin_copy()
            casts = saved.casts if saves_casts and uses_autocast(x_BTW) else nullcontext()
            with casts, saved_tensors_hooks(saved.pack, saved.unpack):
                output = forward(x_BTW, *args, **kwargs)
            if previous is not None:
                previous.finish_copy()
            return output

        block.forward = offloading_forward


class SavedTensors(ABC):
    """Tensors that one forward pass of a block saves; each storage is offloaded once.

    Args:
        block: Block that saves them.
        shared: Inputs that other blocks read as well.
    """

    def __init__(self, block: nn.Module, shared: list[Tensor]) -> None:
        self.casts = WeightCasts(block)
        self._block, self._shared = block, storage_keys(shared)
        self._storages: weakref.WeakValueDictionary[tuple[int, int], SavedStorage] = (
            weakref.WeakValueDictionary()
        )

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
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if (source := self.casts.source_of(storage)) is not None:
            return _WeightCast(*source, tensor_version(source[0]), tensor.dtype, view)
        key = (storage_id(storage), tensor_version(tensor))
        if (saved := self._storages.get(key)) is None:
            saved = self._storages[key] = self._save(_storage_bytes(tensor))
            weakref.finalize(storage, self._storages.pop, key, None)
        return _StorageView(saved, tensor.dtype, view)

    def unpack(self, packed: Any) -> Tensor:
        """Unpack hook of ``saved_tensors_hooks``: the tensor that was packed."""
        if isinstance(packed, _StorageView | _WeightCast):
            return packed.restore()
        if not isinstance(packed, _WrappedTensor):
            return cast(Tensor, packed)
        inner = {
            name: self.unpack(part)
            if isinstance(part, Tensor | _StorageView | _WeightCast | _WrappedTensor)
            else part
            for name, part in packed.inner.items()
        }
        tensor = packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
        return cast(Tensor, tensor)

    @abstractmethod
    def _save(self, contents: Tensor) -> SavedStorage:
        """Return the handle of a storage with these contents, as ``torch.uint8``."""

    def _resident_storages(self) -> set[int]:
        """Storages of parameters, as gathered now, and of shared inputs."""
        return storage_keys([*self._block.parameters(), *self._block.buffers()]) | self._shared


class SavedStorage(ABC):
    """Handle of a storage; what it holds is freed with it, after the last use in backward."""

    @abstractmethod
    def bytes(self) -> Tensor:
        """Return the contents on the device, as ``torch.uint8``."""


class TensorsOnDisk(SavedTensors):
    """Tensors in an unnamed file, written at once and read by the first use."""

    _file: IO[bytes] | None = None

    def _save(self, contents: Tensor) -> SavedStorage:
        size = len(contents)
        if has_no_values(contents):
            return _StorageOnDisk(lambda: torch.empty(size, dtype=torch.uint8))
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the finalizer)
            weakref.finalize(self, self._file.close)
        begin = self._file.seek(0, SEEK_END)
        self._file.write(contents.numpy().data)
        return _StorageOnDisk(lambda: self._read_file(begin, size))

    def _read_file(self, begin: int, size: int) -> Tensor:
        restored = torch.empty(size, dtype=torch.uint8)
        assert self._file is not None
        self._file.seek(begin)
        self._file.readinto(restored.numpy().data)  # type: ignore[attr-defined]  # IO lacks it
        return restored


class _StorageOnDisk(SavedStorage):
    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self._bytes: Tensor | None = None

    def bytes(self) -> Tensor:
        """Return the contents, read once."""
        if self._bytes is None:
            self._bytes = self._read()
        return self._bytes


class TensorsInPinnedMemory(SavedTensors):
    """Tensors that stay on the device until the next block runs, then in pinned host memory.

    Args:
        block: Block that saves them.
        shared: Inputs that other blocks read as well.
        memory: Host memory, with the stream of the copies.
        previous: Tensors of the block before, in the same forward pass.
    """

    def __init__(
        self,
        block: nn.Module,
        shared: list[Tensor],
        memory: PinnedMemory,
        previous: TensorsInPinnedMemory | None,
    ) -> None:
        super().__init__(block, shared)
        self._memory, self._previous = memory, previous
        self._saved: list[weakref.ref[_StorageInPinnedMemory]] = []
        self._copied: list[_StorageInPinnedMemory] = []

    def _save(self, contents: Tensor) -> SavedStorage:
        saved = _StorageInPinnedMemory(self, contents)
        self._saved.append(weakref.ref(saved))
        return saved

    def _list_storages(self) -> list[_StorageInPinnedMemory]:
        return [storage for reference in self._saved if (storage := reference()) is not None]

    def begin_copy(self) -> None:
        """Start to copy all storages whose backward has not run to the host."""
        self._copied = [it for it in self._list_storages() if it.on_host is None]
        on_device = [cast(Tensor, it.on_device) for it in self._copied]
        if not on_device:
            return
        on_host, copies = self._memory.copy_out(on_device)
        for storage, host_bytes in zip(self._copied, on_host, strict=True):
            storage.on_host, storage.copies = host_bytes, copies

    def finish_copy(self) -> None:
        """Let the device wait for the copies, and free what they have read."""
        for storage in self._copied:
            assert storage.copies is not None
            storage.copies.wait()
            storage.on_device = None
        self._copied = []

    def fetch(self) -> None:
        """Start to copy back all storages that are only on the host."""
        missing = [it for it in self._list_storages() if it.on_device is None]
        if not missing:
            return
        on_host = [cast(HostBytes, it.on_host) for it in missing]
        on_device, copies = self._memory.copy_in(on_host, missing[0].device)
        for storage, device_bytes in zip(missing, on_device, strict=True):
            storage.on_device, storage.copies = device_bytes, copies

    def fetch_previous(self) -> None:
        """Start to copy back the storages of the block before, once."""
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.fetch()


class _StorageInPinnedMemory(SavedStorage):
    def __init__(self, saved: TensorsInPinnedMemory, on_device: Tensor) -> None:
        self._saved, self.device = saved, on_device.device
        self.on_device: Tensor | None = on_device
        self.on_host: HostBytes | None = None
        self.copies: SideCopies | None = None
        """Copies that read or write ``on_device``."""

    def __del__(self) -> None:
        """Let the device wait for copies to memory that is freed unused."""
        if self.copies is not None:
            self.copies.wait()

    def bytes(self) -> Tensor:
        """Return the contents; the device waits until they are there."""
        if self.on_device is None:
            self._saved.fetch()
        self._saved.fetch_previous()
        if self.copies is not None:
            self.copies.wait()
        return cast(Tensor, self.on_device)


class WeightCasts(TorchDispatchMode):
    """Record which tensors are casts of a block's parameters, such as those of autocast."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self._parameters = {storage_key(it): it for it in iter_plain_tensors(block.parameters())}
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is CAST_OP:
            pairs = zip(iter_plain_tensors(args[:1]), iter_plain_tensors([result]), strict=True)
            for source, result_part in pairs:
                parameter = self._parameters.get(storage_key(source))
                if parameter is not None:
                    storage = result_part.untyped_storage()
                    self._sources[storage_id(storage)] = parameter, source
                    weakref.finalize(storage, self._sources.pop, storage_id(storage))
        return result

    def source_of(self, storage: UntypedStorage) -> tuple[Tensor, Tensor] | None:
        """Return the parameter whose cast has this storage, and the view of it that was cast."""
        return self._sources.get(storage_id(storage))


View = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and storage offset."""


@dataclass(frozen=True)
class _StorageView:
    """Handle of a tensor in an offloaded storage."""

    storage: SavedStorage
    dtype: torch.dtype
    view: View

    def restore(self) -> Tensor:
        """Return the tensor."""
        storage_bytes = self.storage.bytes()
        remainder = len(storage_bytes) % self.dtype.itemsize
        elements = storage_bytes[: len(storage_bytes) - remainder].view(self.dtype)
        return elements.as_strided(*self.view)


@dataclass(frozen=True)
class _WeightCast:
    """Handle of a cast of a parameter, or of a view of it."""

    parameter: Tensor
    source: Tensor
    version: int
    dtype: torch.dtype
    view: View

    def restore(self) -> Tensor:
        """Return the cast, computed again.

        Raises ``RuntimeError`` if the parameter has changed.
        """
        if tensor_version(self.parameter) != self.version:
            raise RuntimeError("a weight was changed between forward and backward")
        return self.source.detach().to(self.dtype).as_strided(*self.view)


@dataclass(frozen=True)
class _WrappedTensor:
    """Handle of a tensor subclass, such as DTensor, with packed inner tensors."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _storage_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all whole elements in the storage of a tensor."""
    elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
