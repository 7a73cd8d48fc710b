"""CPU allocations of compiled code, counted by torch's profiler."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scalewise.compat.torch import (
    iter_allocations,
    start_allocation_profiler,
    stop_allocation_profiler,
)
from scalewise.measure.storages import iter_plain_tensors, storage_key


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
