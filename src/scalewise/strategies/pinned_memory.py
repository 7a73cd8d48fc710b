"""Pinned host memory that is reused, and copies between it and a CUDA device on a side stream."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from scalewise.compat.torch import has_no_values

MAX_SLAB_RATIO = 2
"""Largest size of a reused slab, as a multiple of the size that is asked for."""


class SideCopies:
    """Copies on a side stream. ``wait`` comes before their memory is freed or their result read."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait for the copies; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None


@dataclass(frozen=True)
class HostBytes:
    """Part of a slab, which is not reused before all its parts are deleted."""

    bytes: Tensor
    """Contents, as ``torch.uint8``."""
    slab: _Slab
    """Slab of the part."""


class _Slab:
    """Use of a slab until this object is deleted."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class PinnedMemory:
    """Slabs of pinned host memory, and a stream for copies from and to a CUDA device.

    One stream serves both directions, so that copies to a reused slab follow those from it. Slabs
    are pinned by ``cudaHostRegister``: torch's allocator would round their sizes up to powers of
    two.
    """

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._free: list[Tensor] = []
        self._streams: list[torch.cuda.Stream] = []
        weakref.finalize(self, _unpin, self._slabs, self._streams)

    @property
    def allocated_bytes(self) -> int:
        """Size of all slabs, in bytes."""
        return sum(map(len, self._slabs))

    def copy_out(self, tensors: Sequence[Tensor]) -> tuple[list[HostBytes], SideCopies]:
        """Start to copy tensors of bytes to one slab."""
        sizes = [len(tensor) for tensor in tensors]
        slab = self._take_slab(sum(sizes))
        parts = [HostBytes(part, slab) for part in slab.memory[: sum(sizes)].split(sizes)]
        with self._side_stream() as copies:
            for part, tensor in zip(parts, tensors, strict=True):
                part.bytes.copy_(tensor, non_blocking=True)
        return parts, copies

    def copy_in(
        self, parts: Sequence[HostBytes], device: torch.device
    ) -> tuple[list[Tensor], SideCopies]:
        """Start to copy parts of slabs to new tensors of a device."""
        # Memory of the current stream: what used it before has ended when the copies start.
        tensors = [torch.empty_like(part.bytes, device=device) for part in parts]
        with self._side_stream() as copies:
            for part, tensor in zip(parts, tensors, strict=True):
                tensor.copy_(part.bytes, non_blocking=True)
        return tensors, copies

    @contextmanager
    def _side_stream(self) -> Iterator[SideCopies]:
        """Context of the side stream, which first waits for the current one."""
        if not self._streams:
            self._streams.append(torch.cuda.Stream())
        (stream,), copies = self._streams, SideCopies()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield copies
        copies.event = stream.record_event()

    def _take_slab(self, size: int) -> _Slab:
        """Smallest free slab that is large enough but not too large, or a new one."""
        index = bisect_left(self._free, size, key=len)
        if index < len(self._free) and len(self._free[index]) <= MAX_SLAB_RATIO * size:
            memory = self._free.pop(index)
        else:
            memory = _pin(size)
            self._slabs.append(memory)
        slab = _Slab(memory)
        weakref.finalize(slab, self._give_back, memory).atexit = False
        return slab

    def _give_back(self, memory: Tensor) -> None:
        insort(self._free, memory, key=len)


def _pin(size: int) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    if has_no_values(memory):
        return memory
    # Whole pages, which no other allocation shares.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    return memory


def _unpin(slabs: list[Tensor], streams: list[torch.cuda.Stream]) -> None:
    """Unregister all slabs once the copies have ended."""
    for stream in streams:
        stream.synchronize()
    for memory in slabs:
        if not has_no_values(memory):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
