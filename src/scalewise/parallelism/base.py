"""Base class of the parallelism configs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind

DEFAULT_CPU_RANKS = 2
"""Number of CPU ranks of a parallel axis without a configured size."""


class ParallelismConfig(ABC):
    """Config of a parallelism strategy.

    A parallelism strategy decides how parameters, activations and data are sharded across ranks. It
    changes memory and communication, not the training result.
    """

    implementation: ClassVar[str]
    """Module that registers the Lightning strategy with ``build_strategy``."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Slow imports of the ranks, which the forkserver preloads."""
    supports_optimizer_sharding = False
    """Whether ``optimizer.shard`` can partition optimizer state over replicas."""
    supports_optimizer_offload = False
    """Whether ``optimizer.offload`` is supported; other strategies have their own option."""
    flattens_parameters = False
    """Whether the optimizer updates chunks of one flat parameter vector."""

    @property
    def supports_compile(self) -> bool:
        """Whether blocks can be compiled on CUDA."""
        return True

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are complete only after the backward pass."""
        return True

    @property
    def backward_follows_forward(self) -> bool:
        """Whether each backward directly follows its forward, with parameters still in memory."""
        return True

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks, one process and one device each."""

    @property
    def uses_process_group(self) -> bool:
        """Whether the ranks are processes of a process group."""
        return self.world_size > 1

    @property
    def shards_parameters(self) -> bool:
        """Whether the optimizer of a rank updates shards of matrices."""
        return self.flattens_parameters

    @property
    def has_gatherable_shards(self) -> bool:
        """Whether these shards are on the device and can be gathered."""
        return False

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.world_size

    def data_parallel_rank(self, rank: int) -> int:
        """Return the index of a rank among ranks that read different samples."""
        return rank

    def dropout_rank(self, rank: int) -> int:
        """Return the dropout seed offset of a rank; ranks with the same activations share it."""
        return rank

    @property
    def gradient_averaging_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.data_parallel_size

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Reason why a callback cannot average weights with this strategy, and a fix; or None."""
        return None

    @property
    def native_extensions(self) -> tuple[str, ...]:
        """DeepSpeed extensions to compile before the ranks start."""
        return ()

    def resolve(self, devices: int | None) -> Self:
        """Return the config with open sizes filled in for a number of devices.

        ``devices``: number of devices; None on the CPU, which takes ``DEFAULT_CPU_RANKS``.
        """
        return self

    def shrink(self) -> Self:
        """Return the config with at most two ranks along each axis."""
        return self

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield a config issue for each invalid size."""
        yield from ()

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yield a config issue for each option that a kind of device does not support."""
        yield from ()

    def describe_group(self, axes: Sequence[str], devices_per_node: int | None) -> tuple[int, int]:
        """Return the size of the group along ``axes``, and its number of ranks in one node."""
        ranks = self.world_size
        return ranks, min(ranks, devices_per_node or ranks)

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the ranks of the group along ``axes`` that contains ``rank``."""
        return tuple(range(self.world_size))
