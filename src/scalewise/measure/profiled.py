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

    def __init__(self, resized: Iterable[torch.Tensor] = ()) -> None:
        """``resized`` are tensors from before that change their size in between."""
        self._resized = [tensor.untyped_storage() for tensor in resized]
        self._before: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._alive: dict[int, int] = {}
        self._held = self._peak = 0
        self._records = False

    def __enter__(self) -> ProfiledAllocations:
        silence_profiler()
        self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors from before as long as they live."""
        for tensor in iter_plain_tensors(tensors):
            storage = tensor.untyped_storage()
            self._before[storage_key(tensor)] = (weakref.ref(storage), storage.nbytes())

    @property
    def watched(self) -> int:
        """Returns the bytes that tensors from before have now."""
        return sum(storage.nbytes() for storage in self._resized)

    @property
    def now(self) -> int:
        """Returns the bytes that are alive."""
        self._settle()
        return sum(self._alive.values()) + self._from_before()

    def take_peak(self) -> int:
        """Returns the largest count since the last call."""
        now = self.now
        peak, self._peak = max(self._peak, now), now
        return peak

    def bytes_among(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of those tensors that are counted here already."""
        self._settle()
        storages = {
            storage_key(tensor): tensor.untyped_storage() for tensor in iter_plain_tensors(tensors)
        }
        return sum(
            storage.nbytes()
            for key, storage in storages.items()
            if key in self._before or storage.data_ptr() in self._alive
        )

    def _settle(self) -> None:
        if self._records:
            self._end()
            self._begin()

    def _begin(self) -> None:
        self._held = self._from_before()
        _prepare_profiler(CONFIG, ACTIVITIES)
        _enable_profiler(CONFIG, ACTIVITIES, SCOPES)  # type: ignore[call-arg]  # torch's stub lacks it
        self._records = True

    def _end(self) -> None:
        self._records = False
        events = _disable_profiler().experimental_event_tree()
        count = sum(self._alive.values())
        self._peak = max(self._peak, count + self._held)
        for place, size in _iter_allocations(events):
            if size > 0:
                self._alive[place] = size
                count += size
            else:
                count -= self._alive.pop(place, 0)
            self._peak = max(self._peak, count + self._held)

    def _from_before(self) -> int:
        """Returns the bytes that are alive of what was there before."""
        followed = sum(size for storage, size in self._before.values() if storage() is not None)
        resized = (each for each in self._resized if each.data_ptr() not in self._alive)
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
