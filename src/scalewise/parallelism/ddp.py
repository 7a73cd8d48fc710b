"""Data parallelism with DDP: each rank stores the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig
from scalewise.registry import register_option


class CommHook(StrEnum):
    """Compression of gradient buckets before they are reduced; all but ``none`` are lossy."""

    none = "none"
    """No compression."""
    fp16 = "fp16"
    """Gradients are reduced in fp16."""
    bf16 = "bf16"
    """Gradients are reduced in bf16."""
    powersgd = "powersgd"
    """Low-rank factors (PowerSGD; Vogels et al., 2019)."""
    fp16_powersgd = "fp16_powersgd"
    """Low-rank factors, sent in fp16."""
    post_local_sgd = "post_local_sgd"
    """Local steps with periodic averages of the parameters (Lin et al., 2020)."""

    @property
    def is_powersgd(self) -> bool:
        """Whether gradients are reduced as low-rank factors."""
        return self in (CommHook.powersgd, CommHook.fp16_powersgd)

    @property
    def changes_updates(self) -> bool:
        """Whether updates differ from those of averaged gradients by more than rounding."""
        return self.is_powersgd or self is CommHook.post_local_sgd


@register_option("parallelism", "ddp")
@dataclass(frozen=True)
class DDPConfig(ParallelismConfig):
    """DistributedDataParallel: replicas of the model average gradients (Li et al., 2020)."""

    implementation = "scalewise.strategies.ddp"
    supports_optimizer_sharding = True
    supports_optimizer_offload = True

    replicas: int | None = None
    """Number of ranks; null: all devices of the machine, or two ranks on the CPU."""
    bucket_mib: float = 25.0
    """Bucket size of the gradient all-reduce, which overlaps with backward, in MiB."""
    gradient_as_bucket_view: bool = True
    """Whether gradients are views of the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Whether every step uses the same parameters in the same order."""
    comm_hook: CommHook = CommHook.none
    """Compression of gradients before they are reduced."""
    powersgd_rank: int = 4
    """Rank of the PowerSGD factors (Vogels et al., 2019)."""
    lossless_steps: int = 10
    """Uncompressed phase before PowerSGD or post-local SGD starts, in optimizer steps."""
    averaging_period: int = 4
    """Interval between parameter averages of post-local SGD (Lin et al., 2020), in optimizer
    steps."""

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.replicas or DEFAULT_CPU_RANKS

    @property
    def averages_gradients(self) -> bool:
        """Whether all ranks update their parameters by the same gradients."""
        return self.comm_hook is not CommHook.post_local_sgd

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Conflict of post-local SGD: ranks train different weights between averages."""
        if self.comm_hook is not CommHook.post_local_sgd:
            return None
        reason = (
            "averages the weights of one rank, and post_local_sgd trains different weights per rank"
        )
        return reason, "set parallelism.comm_hook=none"

    def resolve(self, devices: int | None) -> Self:
        """Return the config with ``replicas`` filled in."""
        if self.replicas is not None:
            return self
        return replace(self, replicas=DEFAULT_CPU_RANKS if devices is None else devices)

    def shrink(self) -> Self:
        """Return the config with at most two replicas."""
        return replace(self, replicas=min(self.world_size, 2))

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield a config issue for each invalid size."""
        for key in ("replicas", "powersgd_rank", "averaging_period"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield ConfigIssue(f"parallelism.{key}", value, "must be 1 or more")
        if not self.bucket_mib > 0:
            yield ConfigIssue("parallelism.bucket_mib", self.bucket_mib, "must be positive")
        minimum = 2 if self.comm_hook.is_powersgd else 0
        if self.lossless_steps < minimum:
            reason = f"must be {minimum} or more with comm_hook={self.comm_hook}"
            fix = f"set parallelism.lossless_steps={minimum}"
            yield ConfigIssue("parallelism.lossless_steps", self.lossless_steps, reason, fix)

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yield a config issue for a hook that gloo does not support."""
        if self.comm_hook is CommHook.bf16 and device is DeviceKind.cpu:
            yield ConfigIssue(
                "parallelism.comm_hook",
                "bf16",
                "gloo does not support bf16 reduction; torch has this hook for NCCL only",
                "set parallelism.comm_hook=fp16",
            )
