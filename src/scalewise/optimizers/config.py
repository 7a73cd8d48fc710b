"""Configs of all optimizers: hyperparameters, and state per parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scalewise.errors import ConfigIssue
from scalewise.models.base import Weight
from scalewise.optimizers.base import (
    FP32_BYTES,
    FixedStateOptimizerConfig,
    OptimizerConfig,
    betas_issues,
)
from scalewise.optimizers.lr_transfer import UpdateScale, is_hidden_matrix
from scalewise.registry import register_option

MIN_QUANTIZED_ELEMENTS = 4096
"""Elements of the smallest parameter whose state torchao quantizes."""
QUANTIZE_BYTES = 24
"""Temporary bytes per element while codes are computed: moments, parameter in fp32, indices."""
BF16_BYTES = 2
"""Bytes per element of an update during orthogonalization."""
ORTHOGONALIZED_ELEMENTS = 1 << 22
"""Elements of the matrices that a CUDA device orthogonalizes at once: one of 2048 x 2048."""


@dataclass(frozen=True)
class AdamBase(OptimizerConfig):
    """Hyperparameters that every variant of Adam has."""

    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    epsilon: float = 1e-8
    """Constant added to the root of the second moment."""

    update_scale: ClassVar[UpdateScale | None] = UpdateScale.normalized

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

    @property
    def update_tensors(self) -> int:
        """2 unless the kernel is fused: the root of the second moment, and the denominator."""
        return 0 if self.fused else 2


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


@register_option("optimizer", "schedule_free")
@dataclass(frozen=True)
class ScheduleFreeConfig(AdamBase, FixedStateOptimizerConfig):
    """Schedule-free AdamW (Defazio et al., 2024), by the authors' package.

    Gradients are evaluated between the iterate and the average of all iterates; validation uses the
    average.
    """

    lr: float = 2.5e-3
    """Learning rate after the warm-up of ``schedule``."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    beta1: float = 0.9
    """Weight of the average at the point where gradients are evaluated."""
    beta2: float = 0.999
    """Decay rate of the second moment."""

    implementation = "scalewise.optimizers.implementations"
    packages = ("schedulefree",)
    update_scale = None
    elementwise = False
    averages_weights = True

    @property
    def state_slots(self) -> int:
        """2: the iterate z, and the second moment."""
        return 2


@register_option("optimizer", "sgd")
@dataclass(frozen=True)
class SGDConfig(FixedStateOptimizerConfig):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay rate of the momentum; 0: no momentum and no state."""
    nesterov: bool = False
    """Whether Nesterov momentum is used."""
    weight_decay: float = 0.0
    """L2 penalty that is added to the gradient of matrices."""

    implementation = "scalewise.optimizers.implementations"
    update_scale = UpdateScale.proportional

    @property
    def state_slots(self) -> int:
        """1 with momentum, else 0."""
        return 1 if self.momentum else 0

    @property
    def update_tensors(self) -> int:
        """Gradient plus weight decay, and that plus Nesterov momentum."""
        return (self.weight_decay > 0) + self.nesterov

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues with values out of range, and with Nesterov without momentum."""
        yield from super().validate()
        yield from betas_issues(self, "momentum")
        if self.nesterov and not self.momentum:
            yield ConfigIssue(
                "optimizer.nesterov", True, "requires momentum", "set optimizer.momentum=0.9"
            )


@register_option("optimizer", "lion")
@dataclass(frozen=True)
class LionConfig(FixedStateOptimizerConfig):
    """Lion: the sign of an interpolated momentum (Chen et al., 2023).

    Use a third of AdamW's learning rate or less.
    """

    lr: float = 1e-4
    """Peak learning rate: the change of each parameter per step."""
    beta1: float = 0.9
    """Weight of the momentum in the update."""
    beta2: float = 0.99
    """Decay rate of the momentum."""

    implementation = "scalewise.optimizers.implementations"
    update_scale = UpdateScale.normalized

    @property
    def state_slots(self) -> int:
        """1: the momentum."""
        return 1

    @property
    def update_tensors(self) -> int:
        """1: the interpolated momentum."""
        return 1

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        yield from betas_issues(self, "beta1", "beta2")


@register_option("optimizer", "adafactor")
@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor: a factored second moment per matrix (Shazeer and Stern, 2018), by torch.

    Steps are relative to the size of a parameter: ``lr`` is the largest relative step, and
    1 / sqrt(step) replaces it once that is smaller.
    """

    lr: float = 1e-2
    """Largest relative step."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step."""
    beta2_decay: float = -0.8
    """Exponent of the second moment's decay: step t gives the newest gradient the weight ``t **
    beta2_decay``."""

    implementation = "scalewise.optimizers.implementations"
    elementwise = False
    uses_whole_weights = True

    @property
    def supports_stochastic_rounding(self) -> bool:
        """Whether ``precision.stochastic_rounding`` can compute the update in fp32."""
        return True

    def rounding_scratch_bytes(self, weight: Weight, shards: int) -> int:
        """Bytes of parameter, gradient and update in fp32."""
        return 3 * FP32_BYTES * weight.shard_numel(shards)

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of row and column means of a matrix, or of the second moment of a vector."""
        if len(weight.shape) < 2:
            return weight.shard_numel(shards) * element_bytes
        *batch, rows, columns = weight.shape
        numel = rows + columns
        for size in batch:
            numel *= size
        return numel * element_bytes

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        if not self.beta2_decay <= 0:
            yield ConfigIssue("optimizer.beta2_decay", self.beta2_decay, "must be 0 or less")


def batch_size(numel: int, *, on_cuda: bool) -> int:
    """Number of matrices of ``numel`` elements that a rank orthogonalizes at once.

    On CUDA, enough to fill the device.
    """
    return max(1, ORTHOGONALIZED_ELEMENTS // numel) if on_cuda else 1


@register_option("optimizer", "muon")
@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon: orthogonalized momentum for matrices of blocks (Jordan et al., 2024), else AdamW.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate serves
    both.
    """

    momentum: float = 0.95
    """Decay rate of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Whether Nesterov momentum is used."""
    beta1: float = 0.9
    """Decay rate of the first moment of AdamW."""
    beta2: float = 0.95
    """Decay rate of the second moment of AdamW."""
    epsilon: float = 1e-8
    """Constant added to the root of AdamW's second moment."""

    implementation = "scalewise.optimizers.muon"
    elementwise = False
    uses_whole_weights = True
    gathers_shards = True

    def is_hidden(self, weight: Weight) -> bool:
        """Whether a weight is a matrix of a block, which is orthogonalized."""
        return is_hidden_matrix(weight)

    def state_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of the momentum of hidden matrices, or of both moments of other parameters."""
        return (1 if self.is_hidden(weight) else 2) * weight.shard_numel(shards) * element_bytes

    def distributes_update(self, weight: Weight) -> bool:
        """Whether a weight is orthogonalized, by one of the ranks."""
        return self.is_hidden(weight)

    def scratch_bytes(self, weight: Weight, shards: int, element_bytes: int) -> int:
        """Bytes of a gathered update and of its orthogonalization."""
        return (
            weight.numel * (element_bytes + BF16_BYTES)
            if shards > 1 and self.is_hidden(weight)
            else 0
        )

    def group_settings(self, weight: Weight) -> dict[str, object]:
        """Learning rate, weight decay, and whether the weight is orthogonalized."""
        return {**super().group_settings(weight), "hidden": self.is_hidden(weight)}

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each hyperparameter out of range."""
        yield from super().validate()
        yield from betas_issues(self, "momentum", "beta1", "beta2")
        if not self.epsilon > 0:
            yield ConfigIssue("optimizer.epsilon", self.epsilon, "must be positive")
