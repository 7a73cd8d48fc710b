"""What fills the memory of one step: counted on the CPU, asked of the allocator on CUDA."""

from __future__ import annotations

import resource
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalewise.measure.profiled import ProfiledAllocations
from scalewise.measure.storages import iter_plain_tensors, storage_bytes, storage_key

LETTING_GO = 0.005
"""Seconds that a thread of gloo is given to let go of what it has sent, once it has said so."""
SENDS = ("c10d", "_c10d_functional")
"""Where torch has its collectives."""


class StrategyBuffers:
    """What a layout holds beside a module's own tensors: nothing."""

    def parameters(self) -> list[torch.Tensor]:
        """Returns further tensors of weights."""
        return []

    def gradients(self) -> list[torch.Tensor]:
        """Returns further tensors of gradients."""
        return []

    def buckets(self) -> list[torch.Tensor]:
        """Returns buffers on the way of gradients that an earlier micro batch may have left."""
        return []

    def resizable(self) -> list[torch.Tensor]:
        """Returns tensors whose storage grows and shrinks with no operator to tell of it."""
        return []


class MemoryProbe:
    """Measures one optimizer step, from the start of its last micro batch to its end."""

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
        """``strategy_buffers`` knows of tensors that are not where torch keeps them.

        ``averages``: moving averages of the weights, which last from step to step.
        ``compiled``: whether some of what runs is code of a compiler, and no operator tells of it.
        """
        self._module, self._optimizer, self._device = module, optimizer, device
        self._strategy_buffers, self._averages = (
            strategy_buffers or StrategyBuffers(),
            list(averages),
        )
        self._live: LiveBytes | ProfiledAllocations | None = None
        if device.type != "cuda":
            counted = ProfiledAllocations if compiled else LiveBytes
            self._live = counted(self._strategy_buffers.resizable())
        self._measured: dict[str, int] = {}
        self._peak = 0

    def start(self) -> None:
        """Begins, before forward."""
        lasting = [*self._parameters(), *_optimizer_states(self._optimizer), *self._averages]
        self._persistent_bytes = storage_bytes(lasting)
        self._bucket_bytes = 0
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.track([*self._gradients(), *self._strategy_buffers.buckets()])
            self._live.__enter__()
        self._start_bytes = self._bytes_without_gradients()

    def before_backward(self) -> None:
        """Takes the activations: what forward left alive; of several calls the most counts."""
        kept = self._bytes_without_gradients() - self._start_bytes
        self._measured["activations"] = max(kept, self._measured.get("activations", 0))

    def before_optimizer(self) -> None:
        """Takes the gradients, which are all there now."""
        gradients = self._gradients()
        self._measured["gradients"] = storage_bytes(gradients)
        if self._live is not None:  # what no operator made since lies where it always does
            self._bucket_bytes = self._measured["gradients"] - self._live.tracked_bytes(gradients)

    def take_phase_peak(self) -> int:
        """Returns the most that operators had made and kept since the last call, on the CPU."""
        assert self._live is not None
        part = self._live.take_peak()
        self._peak = max(self._peak, part)
        return part

    @property
    def persistent_bytes(self) -> int:
        """Returns what is there throughout the step: weights, state, gradients from before."""
        return self._persistent_bytes + self._bucket_bytes

    def finish(self) -> dict[str, int]:
        """Returns bytes by ``memory/..._bytes`` key, after the optimizer's step."""
        if self._live is None:
            self._peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self.take_phase_peak()
            self._peak += self.persistent_bytes
            self._live.__exit__(None, None, None)
        found = {
            "parameters": storage_bytes(self._parameters()),
            "optimizer": storage_bytes(_optimizer_states(self._optimizer)),
            **self._measured,
            "peak": self._peak,
            "host_peak": host_peak_bytes(),
        }
        return {f"memory/{name}_bytes": value for name, value in found.items()}

    def abandon(self) -> None:
        """Stops counting in a step that will not end."""
        if self._live is not None:
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
        own = [*self._module.parameters(), *self._module.buffers()]
        return [*own, *self._strategy_buffers.parameters()]

    def _gradients(self) -> list[torch.Tensor]:
        own = [p.grad for p in self._module.parameters() if p.grad is not None]
        return [*own, *self._strategy_buffers.gradients()]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators allocate while it is active.

    ``resizable`` are tensors from before that change their size in between. Scratch space inside
    one operator is not seen.
    """

    def __init__(self, resizable: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self._resizable = [tensor.untyped_storage() for tensor in resizable]
        self._counted_bytes = self._peak = 0
        self._live_storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._sent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        known = {storage_key(tensor) for tensor in iter_plain_tensors(given)}
        known |= {each._cdata for each in given if isinstance(each, torch.UntypedStorage)}
        result = func(*args, **(kwargs or {}))
        for tensor in iter_plain_tensors(tree_leaves(result)):
            if storage_key(tensor) not in known:
                self._track_storage(tensor.untyped_storage())
        self._sent |= func.namespace in SENDS
        if self._sent and self.current_bytes > self._peak:
            time.sleep(LETTING_GO)
            self._sent = False
        self._peak = max(self._peak, self.current_bytes)
        return result

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors from before as long as they live."""
        for tensor in iter_plain_tensors(tensors):
            self._track_storage(tensor.untyped_storage())
        self._peak = max(self._peak, self.current_bytes)

    @property
    def resizable_bytes(self) -> int:
        """Returns the bytes that tensors from before have now."""
        return sum(storage.nbytes() for storage in self._resizable)

    @property
    def current_bytes(self) -> int:
        """Returns the bytes that are alive."""
        return self._counted_bytes + self.resizable_bytes

    def take_peak(self) -> int:
        """Returns the largest count since the last call."""
        peak, self._peak = max(self._peak, self.current_bytes), self.current_bytes
        return peak

    def tracked_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of those tensors that are counted here already."""
        keys = {storage_key(tensor) for tensor in iter_plain_tensors(tensors)}
        return sum(size for key, (_, size) in self._live_storages.items() if key in keys)

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live_storages or not storage.nbytes():
            return
        size = storage.nbytes()

        def forget(_: object) -> None:
            del self._live_storages[key]
            self._counted_bytes -= size

        self._live_storages[key] = (weakref.ref(storage, forget), size)
        self._counted_bytes += size


def host_peak_bytes() -> int:
    """Returns the largest resident set of this process so far, bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _optimizer_states(optimizer: Optimizer) -> list[torch.Tensor]:
    held = getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO's, this rank's part
    return [t for t in tree_leaves(list(held)) if isinstance(t, torch.Tensor)]
