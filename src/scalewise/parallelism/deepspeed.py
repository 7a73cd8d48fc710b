"""DeepSpeed ZeRO: partitioned optimizer state, gradients and parameters, with offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.parallelism.base import DEFAULT_CPU_RANKS, ParallelismConfig
from scalewise.registry import register_option
from scalewise.typed_override import format_override
from scalewise.units import MIB

MAX_LIVE_ELEMENTS = 1_000_000_000
"""Maximum number of gathered elements in stage 3: DeepSpeed's default ``max_live_parameters``."""


class OffloadTarget(StrEnum):
    """Storage of offloaded tensors."""

    none = "none"
    """Device memory: no offload."""
    cpu = "cpu"
    """Host memory."""
    nvme = "nvme"
    """Files on a disk; stage 3 only."""


@register_option("parallelism", "deepspeed")
@dataclass(frozen=True)
class DeepSpeedConfig(ParallelismConfig):
    """DeepSpeed ZeRO: data-parallel ranks partition the training state (Rajbhandari et al., 2020).

    Offload is ZeRO-Offload (Ren et al., 2021) and ZeRO-Infinity (Rajbhandari et al., 2021).
    """

    implementation = "scalewise.strategies.deepspeed"
    flattens_parameters = True

    stage: int = 2
    """What is partitioned: 1 optimizer state, 2 gradients as well, 3 parameters as well."""
    replicas: int | None = None
    """Number of ranks; null: all devices of the machine, or two ranks on the CPU."""
    offload_optimizer: OffloadTarget = OffloadTarget.none
    """Where optimizer state is stored; the CPU then updates the parameters. nvme: stage 3 only."""
    offload_parameters: OffloadTarget = OffloadTarget.none
    """Where parameter partitions are stored; stage 3 only."""
    nvme_path: str | None = None
    """Folder on a fast disk for ``nvme``; null: a folder in scalewise's cache."""
    bucket_mib: float = 200.0
    """Bucket size of gradient reduction and parameter gathering, in MiB of fp32."""
    overlap_comm: bool = True
    """Whether gradient reduction overlaps with backward."""
    contiguous_gradients: bool = True
    """Whether gradients are copied into one buffer to avoid fragmentation."""
    keep_whole_below: int = 100_000
    """Stage 3: parameters smaller than this stay unsharded on every rank, in elements."""
    hierarchical: int = 1
    """ZeRO++ (Wang et al., 2023): size of the group that stores a second copy for backward, in
    ranks."""
    quantized_weights: bool = False
    """ZeRO++: whether parameters are gathered as int8; CUDA only, lossy."""
    quantized_gradients: bool = False
    """ZeRO++: whether gradients are reduced as int4; CUDA only, lossy."""

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.replicas or DEFAULT_CPU_RANKS

    def describe_group(self, axes: Sequence[str], devices_per_node: int | None) -> tuple[int, int]:
        """Return the size of the group along ``axes``, and its number of ranks in one node."""
        ranks = self.hierarchical if "hierarchical" in axes else self.world_size
        return ranks, min(ranks, devices_per_node or ranks)

    @property
    def supports_compile(self) -> bool:
        """Whether parameters stay unsharded: torch cannot trace the hooks of stage 3."""
        return self.stage < 3

    @property
    def backward_follows_forward(self) -> bool:
        """Whether parameters stay gathered between forward and backward, as before stage 3."""
        return self.stage < 3

    @property
    def native_extensions(self) -> tuple[str, ...]:
        """DeepSpeed extensions that this config compiles."""
        optimizer, parameters = self.offload_optimizer, self.offload_parameters
        on_disk = OffloadTarget.nvme in (optimizer, parameters)
        return ("cpu_adam",) * (optimizer is not OffloadTarget.none) + ("async_io",) * on_disk

    def resolve(self, devices: int | None) -> Self:
        """Return the config with ``replicas`` filled in."""
        if self.replicas is not None:
            return self
        return replace(self, replicas=DEFAULT_CPU_RANKS if devices is None else devices)

    def shrink(self) -> Self:
        """Return the config with at most two replicas."""
        return replace(self, replicas=min(self.world_size, 2), hierarchical=1)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield a config issue for each invalid size, and for options that require stage 3."""
        if self.stage not in (1, 2, 3):
            yield ConfigIssue("parallelism.stage", self.stage, "ZeRO has stages 1, 2 and 3")
            return
        for key in ("replicas", "hierarchical"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield ConfigIssue(f"parallelism.{key}", value, "must be 1 or more")
                return
        if not self.bucket_mib >= 1:
            yield ConfigIssue("parallelism.bucket_mib", self.bucket_mib, "must be 1 or more")
        if self.keep_whole_below < 0:
            key = "parallelism.keep_whole_below"
            yield ConfigIssue(key, self.keep_whole_below, "must be 0 or more")
        if self.world_size % self.hierarchical:
            yield ConfigIssue(
                "parallelism.hierarchical",
                self.hierarchical,
                f"does not divide the {self.world_size} replicas",
                "set parallelism.hierarchical=1",
            )
        if self.stage < 3:
            yield from self._validate_lower_stages()

    def _validate_lower_stages(self) -> Iterator[ConfigIssue]:
        if self.offload_optimizer is OffloadTarget.nvme:
            reason = f"stage {self.stage} keeps optimizer state in memory"
            fix = "set parallelism.stage=3, or parallelism.offload_optimizer=cpu"
            yield ConfigIssue("parallelism.offload_optimizer", "nvme", reason, fix)
        defaults = {
            "offload_parameters": OffloadTarget.none,
            "hierarchical": 1,
            "quantized_weights": False,
            "quantized_gradients": False,
        }
        for key, default in defaults.items():
            if (value := getattr(self, key)) != default:
                reason = f"requires stage 3; stage {self.stage} keeps parameters unsharded"
                unset = format_override(f"parallelism.{key}", default)
                fix = f"set parallelism.stage=3, or {unset}"
                yield ConfigIssue(f"parallelism.{key}", value, reason, fix)

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yield a config issue for each kernel that the CPU does not have."""
        for key in ("quantized_weights", "quantized_gradients"):
            if getattr(self, key) and device is DeviceKind.cpu:
                reason = "requires CUDA: DeepSpeed has no CPU kernel for quantization"
                yield ConfigIssue(
                    f"parallelism.{key}", True, reason, f"set parallelism.{key}=false"
                )

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Conflict of weight averages with master weights on a disk, and a fix."""
        if self.offload_optimizer is not OffloadTarget.nvme:
            return None
        reason = "reads the master weights after each step, which are on NVMe with their state"
        return reason, "set parallelism.offload_optimizer=cpu"

    def bucket_elements(self, num_parameters: int) -> int:
        """Return the bucket size for a number of parameters to reduce or gather, in elements."""
        return min(int(self.bucket_mib * MIB / 4), max(num_parameters, 1024))
