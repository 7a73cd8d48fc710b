"""Functions and classes of ``torch.cuda``, replaced by those of a device that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scalewise.compat import PrivateNames

__all__ = ["CudaDevice", "replaced_cuda_functions"]

private = PrivateNames("torch")

RNG_STATE_BYTES = 16


class _FakeEvent:
    """Event that has always happened."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the arguments of ``torch.cuda.Event``."""

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def wait(self, *_: Any) -> None:
        """Do nothing: a stream waits, not the host."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Report that the host waits."""
        self.on_wait("event.synchronize")

    def elapsed_time(self, _: Any) -> float:
        """Return a time in milliseconds."""
        return 1.0


class _FakeStream:
    """Stream on which nothing runs."""

    on_wait: Callable[[str], None]
    device_type = 1
    stream_id = cuda_stream = priority = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, _: Any) -> None:
        """Do nothing: a stream waits, not the host."""

    def wait_event(self, _: Any) -> None:
        """Do nothing: a stream waits, not the host."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event."""
        return event or torch.cuda.Event()

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Report that the host waits."""
        self.on_wait("stream.synchronize")

    def __enter__(self) -> _FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class CudaDevice:
    """Description of a device."""

    name: str
    """Name that the driver reports."""
    capability: tuple[int, int]
    """Compute capability."""
    memory_bytes: int
    """Memory, in bytes."""
    processors: int
    """Number of streaming multiprocessors."""
    count: int = 8
    """Number of such devices on the node."""


def _functions(device: CudaDevice, on_wait: Callable[[str], None]) -> dict[str, object]:
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.memory_bytes,
        multi_processor_count=device.processors,
        pci_domain_id=0xFFFF,  # no such device, so that no NUMA node is near to it
        pci_bus_id=0xFF,
        pci_device_id=0x1F,
    )
    state = {"device": 0}

    def set_device(index: Any) -> None:
        state["device"] = index if isinstance(index, int) else torch.device(index).index or 0

    def constant(value: object = None) -> Callable[..., object]:
        return lambda *_, **__: value  # one object per name: Dynamo identifies functions

    stream_class = type("Stream", (_FakeStream,), {"on_wait": staticmethod(on_wait)})
    event_class = type("Event", (_FakeEvent,), {"on_wait": staticmethod(on_wait)})
    return {
        "is_available": constant(True),
        "is_initialized": constant(True),
        "device_count": constant(device.count),
        "current_device": lambda: state["device"],
        "set_device": set_device,
        "device": lambda *_: nullcontext(),
        "get_device_capability": constant(device.capability),
        "get_device_name": constant(device.name),
        "get_device_properties": constant(properties),
        "is_bf16_supported": constant(True),
        "is_current_stream_capturing": constant(False),
        "mem_get_info": constant((device.memory_bytes, device.memory_bytes)),
        "memory_allocated": constant(0),
        "max_memory_allocated": constant(0),
        "memory_reserved": constant(0),
        "max_memory_reserved": constant(0),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": constant(),
        "set_per_process_memory_fraction": constant(),
        "empty_cache": constant(),
        "ipc_collect": constant(),
        "manual_seed": constant(),
        "manual_seed_all": constant(),
        "get_rng_state": lambda *_: torch.zeros(RNG_STATE_BYTES, dtype=torch.uint8),
        "set_rng_state": constant(),
        "synchronize": lambda *_: on_wait("cuda.synchronize"),
        "Stream": stream_class,
        "Event": event_class,
        "stream": lambda *_: nullcontext(),
        "current_stream": lambda *_: stream_class(),
        "default_stream": lambda *_: stream_class(),
        "_lazy_init": constant(),
        "_is_compiled": constant(False),
    }


@contextmanager
def replaced_cuda_functions(device: CudaDevice, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Context in which ``torch.cuda`` describes a device on which nothing runs.

    Args:
        device: Description of the device.
        on_wait: Called with the name of each function in which the host waits for the device.
    """

    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        return tensor

    with ExitStack() as stack:
        for function, value in _functions(device, on_wait).items():
            stack.enter_context(private.replaced(f"torch.cuda:{function}", value))
        unavailable = "torch.cuda.amp.common:amp_definitely_not_available"
        stack.enter_context(private.replaced(unavailable, lambda: False))
        stack.enter_context(private.replaced("torch:Tensor.pin_memory", pin_memory))
        # Device threads of autograd would end in an abort at the interpreter's exit.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield
