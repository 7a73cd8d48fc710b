"""Memory of tensors and of a training step: by operator or profiler on the CPU, else by CUDA."""

from __future__ import annotations

import os
import resource
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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


class StrategyBuffers:
    """Tensors that a strategy stores besides the module's own; none in this base class."""

    def module_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are stored between steps."""
        return list(module.parameters())

    def parameters(self) -> list[torch.Tensor]:
        """Return additional parameter tensors."""
        return []

    def gradients(self) -> list[torch.Tensor]:
        """Return additional gradient tensors."""
        return []

    def buckets(self) -> list[torch.Tensor]:
        """Return communication buffers that an earlier micro-batch may have left."""
        return []

    def reallocated(self) -> list[torch.Tensor]:
        """Return parameters that a step frees and allocates again."""
        return []

    def resizable(self) -> list[torch.Tensor]:
        """Return tensors whose storage is resized without an operator."""
        return []


class MemoryProbe:
    """Measure the memory of an optimizer step, from the start of its last micro-batches.

    Args:
        module: Module that trains.
        optimizer: Optimizer of the module.
        device: Device of the module.
        strategy_buffers: Tensors of the strategy besides the module's own.
        averages: Moving averages of the weights, which persist between steps.
        compiled: Whether compiled code runs, whose allocations no operator reports.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        strategy_buffers: StrategyBuffers | None = None,
        *,
        averages: Iterable[torch.Tensor] = (),
        compiled: bool = False,
    ) -> None:
        self._module, self._optimizer, self._device = module, optimizer, device
        self._strategy_buffers, self._averages = (
            strategy_buffers or StrategyBuffers(),
            list(averages),
        )
        self._live: LiveBytes | ProfiledAllocations | None = None
        if device.type != "cuda":
            resizable = self._strategy_buffers.resizable()
            device_type = next(module.parameters()).device.type  # of fake tensors, not always CPU
            self._live = (
                ProfiledAllocations(resizable) if compiled else LiveBytes(resizable, device_type)
            )
        self._measured: dict[str, int] = {}
        self._peak, self._is_counting = 0, False

    def start(self) -> None:
        """Start the measurement, before forward."""
        persistent = [*self._parameters(), *_optimizer_states(self._optimizer), *self._averages]
        reallocated = self._strategy_buffers.reallocated()
        self._persistent_bytes = storage_bytes(persistent) - storage_bytes(reallocated)
        self._bucket_bytes = 0
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            buckets = self._strategy_buffers.buckets()
            self._live.track([*self._gradients(), *buckets, *reallocated])
            self._live.__enter__()
            self._is_counting = True
        self._start_bytes = self._bytes_without_gradients()

    def before_backward(self) -> None:
        """Record the activations alive after forward; of several calls, the largest counts."""
        saved_bytes = self._bytes_without_gradients() - self._start_bytes
        self._measured["activations"] = max(saved_bytes, self._measured.get("activations", 0))

    def before_optimizer(self) -> None:
        """Record the gradients, which are complete."""
        gradients = self._gradients()
        self._measured["gradients"] = storage_bytes(gradients)
        if self._live is not None:  # other gradients are in persistent buckets
            self._bucket_bytes = self._measured["gradients"] - self._live.tracked_bytes(gradients)

    def take_phase_peak(self) -> int:
        """Return the peak of operator allocations since the last call, in bytes; CPU only."""
        assert self._live is not None
        peak = self._live.take_peak()
        self._peak = max(self._peak, peak)
        return peak

    @property
    def persistent_bytes(self) -> int:
        """Size of parameters, optimizer state and buckets, which persist in the step, in bytes."""
        return self._persistent_bytes + self._bucket_bytes

    def finish(self) -> dict[str, int]:
        """Return bytes by metric key ``memory/..._bytes``, after the optimizer step."""
        if self._live is None:
            self._peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self.take_phase_peak()
            self._peak += self.persistent_bytes
            self.abandon()
        metrics = {
            "parameters": storage_bytes(self._parameters()),
            "optimizer": storage_bytes(_optimizer_states(self._optimizer)),
            **self._measured,
            "peak": self._peak,
            "host_peak": host_peak_bytes(),
        }
        return {f"memory/{name}_bytes": value for name, value in metrics.items()}

    def abandon(self) -> None:
        """Stop counting, also in a step that does not end."""
        if self._live is not None and self._is_counting:
            self._is_counting = False
            self._live.__exit__(None, None, None)

    def _bytes_without_gradients(self) -> int:
        gradients = self._gradients()
        if self._live is None:
            return torch.cuda.memory_allocated(self._device) - storage_bytes(gradients)
        return (
            self._live.current_bytes
            - self._live.resizable_bytes
            - self._live.tracked_bytes(gradients)
        )

    def _parameters(self) -> list[torch.Tensor]:
        parameters = self._strategy_buffers.module_parameters(self._module)
        return [*parameters, *self._module.buffers(), *self._strategy_buffers.parameters()]

    def _gradients(self) -> list[torch.Tensor]:
        parameters = self._strategy_buffers.module_parameters(self._module)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [*gradients, *self._strategy_buffers.gradients()]


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
        self._resizable = [tensor.untyped_storage() for tensor in resizable]
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
        return sum(storage.nbytes() for storage in self._resizable)

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


def host_peak_bytes() -> int:
    """Return the peak resident set size of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _optimizer_states(optimizer: Optimizer) -> list[torch.Tensor]:
    # A ZeRO wrapper has the partition of this rank in ``optim``.
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [t for t in tree_leaves(list(states)) if isinstance(t, torch.Tensor)]
