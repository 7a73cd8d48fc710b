"""Training on one device."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.parallelism.base import ParallelismConfig
from scalewise.registry import register_option


@register_option("parallelism", "single")
@dataclass(frozen=True)
class SingleConfig(ParallelismConfig):
    """One device without communication."""

    implementation = "scalewise.strategies.single"
    supports_optimizer_offload = True

    @property
    def world_size(self) -> int:
        """One rank."""
        return 1

    @property
    def reduces_after_backward(self) -> bool:
        """False: there is no gradient reduction."""
        return False
