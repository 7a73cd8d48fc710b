"""Training on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import ParallelismConfig
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig
    from scalewise.strategies.base import ParallelStrategy


@register_option("parallelism", "single")
@dataclass(frozen=True)
class SingleConfig(ParallelismConfig):
    """One device without communication."""

    supports_optimizer_offload = True

    @property
    def world_size(self) -> int:
        """One rank."""
        return 1

    @property
    def reduces_after_backward(self) -> bool:
        """False: there is no gradient reduction."""
        return False

    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Return the memory of the only rank: the whole model."""
        from scalewise.parallelism.rank_memory import replicated_memory

        return replicated_memory(run)

    def build_strategy(self, device: DeviceKind) -> ParallelStrategy:
        """Return the single-device Lightning strategy."""
        from scalewise.strategies.single import SingleDevice

        return SingleDevice(device)
