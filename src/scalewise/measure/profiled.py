"""What compiled code allocates on the CPU, of which no operator tells: torch's profiler counts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)

from scalewise.measure.storages import iter_plain_tensors, storage_key

CONFIG = ProfilerConfig(
    ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
)
"""Memory, and nothing else."""
ACTIVITIES = {ProfilerActivity.CPU}
SCOPES = {RecordScope.CUSTOM_CLASS}
"""Not those of operators, whose records are large and, behind compiled code, may be torn."""


def silence_profiler() -> None:
    """Has torch's profiler not tell stderr when it begins and ends."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class ProfiledAllocations:
    """Counts the bytes that torch's allocator gives while it is active, as ``LiveBytes`` does.

    A dispatch mode, as that one is, would have torch leave compiled code aside. What is asked in
    between ends the profiler's record, and begins another.
    """

    def __init__(self, resizable: Iterable[torch.Tensor] = ()) -> None:
        """``resizable`` are tensors from before that change their size in between."""
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
        """Counts tensors from before as long as they live."""
        for tensor in iter_plain_tensors(tensors):
            storage = tensor.untyped_storage()
            self._preexisting[storage_key(tensor)] = (weakref.ref(storage), storage.nbytes())

    @property
    def resizable_bytes(self) -> int:
        """Returns the bytes that tensors from before have now."""
        return sum(storage.nbytes() for storage in self._resizable)

    @property
    def current_bytes(self) -> int:
        """Returns the bytes that are alive."""
        self._restart_recording()
        return sum(self._live_allocations.values()) + self._preexisting_bytes()

    def take_peak(self) -> int:
        """Returns the largest count since the last call."""
        now = self.current_bytes
        peak, self._peak = max(self._peak, now), now
        return peak

    def tracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of those tensors that are counted here already."""
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
        _prepare_profiler(CONFIG, ACTIVITIES)
        _enable_profiler(CONFIG, ACTIVITIES, SCOPES)  # type: ignore[call-arg]  # torch's stub lacks it
        self._recording = True

    def _stop_recording(self) -> None:
        self._recording = False
        events = _disable_profiler().experimental_event_tree()
        count = sum(self._live_allocations.values())
        self._peak = max(self._peak, count + self._base_bytes)
        for place, size in _iter_allocations(events):
            if size > 0:
                self._live_allocations[place] = size
                count += size
            else:
                count -= self._live_allocations.pop(place, 0)
            self._peak = max(self._peak, count + self._base_bytes)

    def _preexisting_bytes(self) -> int:
        """Returns the bytes that are alive of what was there before."""
        followed = sum(
            size for storage, size in self._preexisting.values() if storage() is not None
        )
        resized = (
            each for each in self._resizable if each.data_ptr() not in self._live_allocations
        )
        return followed + sum(storage.nbytes() for storage in resized)


def _iter_allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yields where bytes were given, and how many; those given back are below zero."""
    yield from ((place, size) for _, _, place, size in sorted(_tree_allocations(events)))


def _tree_allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int, int]]:
    for number, event in enumerate(events):
        if event.tag == _EventType.Allocation:
            _, told = event.typed
            yield event.start_time_ns, number, told.ptr, told.alloc_size
        yield from _tree_allocations(event.children)
