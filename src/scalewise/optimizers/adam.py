"""Configs of AdamW: by torch, with paged state, and with quantized state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.optimizers.base import FixedStateOptimizerConfig, OptimizerConfig, betas_issues
from scalewise.registry import register_option

MIN_QUANTIZED_ELEMENTS = 4096
"""Elements of the smallest parameter whose state torchao quantizes."""
FP32_BYTES = 4
QUANTIZE_BYTES = 24
"""Temporary bytes per element while codes are computed: moments, parameter in fp32, indices."""


@dataclass(frozen=True)
class AdamBase(OptimizerConfig):
    """Hyperparameters that every variant of Adam has."""

    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    epsilon: float = 1e-8
    """Constant added to the root of the second moment."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        yield from betas_issues(self, "beta1", "beta2")
        if not self.epsilon > 0:
            yield ConfigIssue("optimizer.epsilon", self.epsilon, "must be positive")


@register_option("optimizer", "adamw")
@dataclass(frozen=True)
class AdamWConfig(AdamBase, FixedStateOptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    fused: bool = True
    """Whether one fused kernel updates all parameters; torch's default loops over them."""
    offload: bool = False
    """Whether the moments are stored, and parameters updated, in host memory; for one device or
    parallelism=ddp."""

    implementation = "scalewise.optimizers.implementations"

    @property
    def state_slots(self) -> int:
        """2: both moments."""
        return 2


@register_option("optimizer", "adamw_paged")
@dataclass(frozen=True)
class PagedAdamWConfig(AdamBase):
    """AdamW with moments in CUDA unified memory, which is paged to the host when a device is full.

    By bitsandbytes (QLoRA; Dettmers et al., 2023, section 3). On the CPU nothing is paged.
    """

    implementation = "scalewise.optimizers.paged"
    packages = ("bitsandbytes",)
    elementwise = False
    uses_whole_weights = True
    pages_state = True

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of both moments, in fp32 for parameters of any data type."""
        return 2 * weight.shard_numel(shards) * FP32_BYTES


@dataclass(frozen=True)
class LowBitAdamWConfig(AdamBase):
    """AdamW with quantized moments, one scale per block.

    Dettmers et al., 2021 (8 bits) and Li et al., 2023 (4 bits), by torchao.
    """

    implementation = "scalewise.optimizers.low_bit_adam"
    packages = ("torchao",)
    elementwise = False

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per element of a moment."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Elements per fp32 scale."""

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of codes, scales and code tables of both moments; small parameters stay in full."""
        numel = weight.shard_numel(shards)
        if not self._is_quantized(numel):
            return 2 * numel * element_bytes
        table = FP32_BYTES << self.bits
        return 2 * (numel * self.bits // 8 + numel // self.block * FP32_BYTES + table)

    def scratch_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of torchao's temporary tensors while it quantizes, uncompiled; measured."""
        numel = weight.shard_numel(shards)
        cast_bytes = FP32_BYTES if element_bytes < FP32_BYTES else 0
        return numel * (QUANTIZE_BYTES + cast_bytes) if self._is_quantized(numel) else 0

    def _is_quantized(self, numel: int) -> bool:
        return numel >= MIN_QUANTIZED_ELEMENTS and numel % self.block == 0


@register_option("optimizer", "adamw_8bit")
@dataclass(frozen=True)
class AdamW8bitConfig(LowBitAdamWConfig):
    """AdamW with 8-bit moments in blocks of 256 (Dettmers et al., 2021), by torchao."""

    bits = 8
    block = 256


@register_option("optimizer", "adamw_4bit")
@dataclass(frozen=True)
class AdamW4bitConfig(LowBitAdamWConfig):
    """AdamW with 4-bit moments in blocks of 128 (Li et al., 2023), by torchao."""

    bits = 4
    block = 128
