"""Bytes of tensors, and of allocations counted by operator or by the profiler, on the CPU."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scalewise.compat.torch import (
    COLLECTIVE_NAMESPACES,
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    iter_allocations,
    start_allocation_profiler,
    stop_allocation_profiler,
    storage_id,
    tree_leaves,
)

GLOO_RELEASE_S = 0.005
"""Time for a gloo thread to free a sent buffer after the collective returns, in seconds."""


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of the storages of tensors on this rank, each counted once, in bytes."""
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in iter_plain_tensors(tensors)
    }
    return sum(storages.values())


def storage_keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the storages of tensors on this rank; valid while the storages live."""
    return {storage_key(tensor) for tensor in iter_plain_tensors(tensors)}


def iter_plain_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside ``leaves``; a DTensor's own storage has the unsharded size."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from iter_plain_tensors(getattr(leaf, name) for name in names)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage; valid while the storage lives."""
    return storage_id(tensor.untyped_storage())


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages that operators allocate while active.

    Temporary memory inside an operator is not counted.

    Args:
        resizable: Existing tensors whose storage is resized.
        device_type: Type of the device whose memory is counted; None: all devices.
    """

    def __init__(
        self, resizable: Iterable[torch.Tensor] = (), device_type: str | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self._device_type = device_type
        # A pipeline replaces some receive buffers, and no reference may keep the old ones alive.
        self._resizable = [weakref.ref(tensor.untyped_storage()) for tensor in resizable]
        self._counted_bytes = self._peak = 0
        self._live_storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._sent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_leaves((args, kwargs))
        tensors = [*iter_plain_tensors(inputs)]
        input_keys = {storage_key(tensor) for tensor in tensors}
        input_keys |= {
            storage_id(leaf) for leaf in inputs if isinstance(leaf, torch.UntypedStorage)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in iter_plain_tensors(tree_leaves(result)):
            is_counted = self._device_type in (None, tensor.device.type)
            if is_counted and storage_key(tensor) not in input_keys:
                self._track_storage(tensor.untyped_storage())
        if func.namespace in COLLECTIVE_NAMESPACES:  # no thread sends fake tensors
            self._sent |= not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        current_bytes = self.current_bytes
        if self._sent and current_bytes > self._peak:
            time.sleep(GLOO_RELEASE_S)
            self._sent = False
            current_bytes = self.current_bytes
        self._peak = max(self._peak, current_bytes)
        return result

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors for as long as they live."""
        for tensor in iter_plain_tensors(tensors):
            self._track_storage(tensor.untyped_storage())
        self._peak = max(self._peak, self.current_bytes)

    @property
    def resizable_bytes(self) -> int:
        """Current size of the resizable tensors, in bytes."""
        storages = (reference() for reference in self._resizable)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    @property
    def current_bytes(self) -> int:
        """Memory that is alive, in bytes."""
        return self._counted_bytes + self.resizable_bytes

    def take_peak(self) -> int:
        """Return the peak since the last call, in bytes."""
        peak, self._peak = max(self._peak, self.current_bytes), self.current_bytes
        return peak

    def tracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the size of those of ``tensors`` that are counted, in bytes."""
        keys = {storage_key(tensor) for tensor in iter_plain_tensors(tensors)}
        return sum(size for key, (_, size) in self._live_storages.items() if key in keys)

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._live_storages or not storage.nbytes():
            return
        size = storage.nbytes()

        def release(_: object) -> None:
            del self._live_storages[key]
            self._counted_bytes -= size

        self._live_storages[key] = (weakref.ref(storage, release), size)
        self._counted_bytes += size


def silence_profiler() -> None:
    """Silence the profiler's messages on stderr."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class ProfiledAllocations:
    """Count the bytes that torch's allocator provides while active, like ``LiveBytes``.

    A dispatch mode like ``LiveBytes`` would disable compiled code. Each query restarts the
    profiler.
    """

    def __init__(self, resizable: Iterable[torch.Tensor] = ()) -> None:
        """``resizable``: existing tensors whose storage is resized."""
        self._resizable = [tensor.untyped_storage() for tensor in resizable]
        self._preexisting: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live_allocations: dict[int, int] = {}
        self._base_bytes = self._peak = 0
        self._recording = False

    def __enter__(self) -> ProfiledAllocations:
        silence_profiler()
        self._start_recording()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_recording()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors for as long as they live."""
        for tensor in iter_plain_tensors(tensors):
            storage = tensor.untyped_storage()
            self._preexisting[storage_key(tensor)] = (weakref.ref(storage), storage.nbytes())

    @property
    def resizable_bytes(self) -> int:
        """Current size of the resizable tensors, in bytes."""
        return sum(storage.nbytes() for storage in self._resizable)

    @property
    def current_bytes(self) -> int:
        """Memory that is alive, in bytes."""
        self._restart_recording()
        return sum(self._live_allocations.values()) + self._preexisting_bytes()

    def take_peak(self) -> int:
        """Return the peak since the last call, in bytes."""
        now = self.current_bytes
        peak, self._peak = max(self._peak, now), now
        return peak

    def tracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the size of those of ``tensors`` that are counted, in bytes."""
        self._restart_recording()
        storages = {
            storage_key(tensor): tensor.untyped_storage() for tensor in iter_plain_tensors(tensors)
        }
        return sum(
            storage.nbytes()
            for key, storage in storages.items()
            if key in self._preexisting or storage.data_ptr() in self._live_allocations
        )

    def _restart_recording(self) -> None:
        if self._recording:
            self._stop_recording()
            self._start_recording()

    def _start_recording(self) -> None:
        self._base_bytes = self._preexisting_bytes()
        start_allocation_profiler()
        self._recording = True

    def _stop_recording(self) -> None:
        self._recording = False
        events = stop_allocation_profiler()
        count = sum(self._live_allocations.values())
        self._peak = max(self._peak, count + self._base_bytes)
        for address, size in _sorted_allocations(events):
            if size > 0:
                self._live_allocations[address] = size
                count += size
            else:
                count -= self._live_allocations.pop(address, 0)
            self._peak = max(self._peak, count + self._base_bytes)

    def _preexisting_bytes(self) -> int:
        """Return the size of the preexisting tensors that are alive, in bytes."""
        tracked_bytes = sum(
            size for storage, size in self._preexisting.values() if storage() is not None
        )
        resizable = (
            storage
            for storage in self._resizable
            if storage.data_ptr() not in self._live_allocations
        )
        return tracked_bytes + sum(storage.nbytes() for storage in resizable)


def _sorted_allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield address and size of each allocation, in order; the size of a free is negative."""
    yield from ((address, size) for _, _, address, size in sorted(iter_allocations(events)))
