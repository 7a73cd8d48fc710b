"""Memory of a training step: by operator or profiler on the CPU, else by CUDA."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from scalewise.compat.torch import tree_leaves
from scalewise.measure.allocated_bytes import LiveBytes, ProfiledAllocations, storage_bytes


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


def host_peak_bytes() -> int:
    """Return the peak resident set size of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _optimizer_states(optimizer: Optimizer) -> list[torch.Tensor]:
    # A ZeRO wrapper has the partition of this rank in ``optim``.
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [t for t in tree_leaves(list(states)) if isinstance(t, torch.Tensor)]
