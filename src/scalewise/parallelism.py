"""How a run is laid over devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from scalewise.config.registry import option
from scalewise.errors import Complaint
from scalewise.hardware import DeviceKind

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

DEFAULT_CPU_RANKS = 2
"""Ranks of a layout on the CPU when none are asked for: the fewest that are parallel."""


class Parallelism(ABC):
    """A layout as a spec."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Returns the number of processes, one device each."""

    @property
    def data_parallel_size(self) -> int:
        """Returns how many ranks see different rows."""
        return self.world_size

    def settle(self, devices: int) -> Self:
        """Returns the layout with sizes left open (None) filled in for ``devices`` devices."""
        return self

    def complaints(self) -> Iterator[Complaint]:
        """Yields sizes that are no layout."""
        yield from ()

    @abstractmethod
    def strategy(self, device: DeviceKind) -> Strategy:
        """Returns the Lightning strategy for a kind of device, in one of the ranks' processes."""


@option("parallelism", "single")
@dataclass(frozen=True)
class Single(Parallelism):
    """One device, no communication."""

    @property
    def world_size(self) -> int:
        """Returns 1."""
        return 1

    def strategy(self, device: DeviceKind) -> Strategy:
        """Returns Lightning's single-device strategy."""
        import torch
        from lightning.pytorch.strategies import SingleDeviceStrategy

        return SingleDeviceStrategy(
            torch.device("cuda", 0) if device is DeviceKind.cuda else torch.device("cpu")
        )


@option("parallelism", "ddp")
@dataclass(frozen=True)
class DDP(Parallelism):
    """Every rank holds the model and sees other rows; gradients are averaged (Li et al., 2020)."""

    replicas: int | None = None
    """Number of ranks; None: every device of the machine, or two ranks on the CPU."""
    bucket_mib: float = 25.0
    """Gradients are reduced in buckets of this size, while backward goes on, MiB."""
    gradient_as_bucket_view: bool = True
    """Whether gradients live inside the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Whether every step uses the same parameters in the same order."""

    @property
    def world_size(self) -> int:
        """Returns the number of replicas."""
        return self.replicas or DEFAULT_CPU_RANKS

    def settle(self, devices: int) -> Self:
        """Returns the layout with ``replicas`` filled in."""
        return self if self.replicas is not None else replace(self, replicas=devices)

    def complaints(self) -> Iterator[Complaint]:
        """Yields sizes that are no layout."""
        if self.replicas is not None and self.replicas < 1:
            yield Complaint("parallelism.replicas", self.replicas, "must be 1 or more")
        if not self.bucket_mib > 0:
            yield Complaint("parallelism.bucket_mib", self.bucket_mib, "must be positive")

    def strategy(self, device: DeviceKind) -> Strategy:
        """Returns Lightning's DDP over NCCL or, on the CPU, gloo."""
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(
            bucket_cap_mb=self.bucket_mib,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
