"""Configs of numeric precision: data types of parameters and of computation, and fp8 matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import ClassVar, Literal

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.registry import register_option

LightningPrecision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


class FloatFormat(StrEnum):
    """A floating-point format."""

    fp32 = "fp32"
    """IEEE single precision, 4 bytes."""
    bf16 = "bf16"
    """bfloat16, 2 bytes."""
    fp16 = "fp16"
    """IEEE half precision, 2 bytes."""

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return 4 if self is FloatFormat.fp32 else 2


_LIGHTNING: dict[tuple[FloatFormat, FloatFormat], LightningPrecision] = {
    (FloatFormat.fp32, FloatFormat.fp32): "32-true",
    (FloatFormat.fp32, FloatFormat.bf16): "bf16-mixed",
    (FloatFormat.bf16, FloatFormat.bf16): "bf16-true",
    (FloatFormat.fp32, FloatFormat.fp16): "16-mixed",
}


@register_option("precision", "precision")
@dataclass(frozen=True)
class Precision:
    """Data types by role. Gradients and optimizer state have the type of the parameters."""

    parameters: FloatFormat = FloatFormat.fp32
    """Data type of parameters, gradients and optimizer state."""
    compute: FloatFormat = FloatFormat.fp32
    """Data type of matmuls and of activations stored for the backward pass."""
    tf32: bool = False
    """Whether fp32 matmuls may run as TF32 on CUDA (10 mantissa bits)."""
    stochastic_rounding: bool = False
    """Whether bf16 parameters are updated in fp32 and rounded up or down at random, so that the
    expected value is exact: updates below half of the last bit are not lost."""

    implementation: ClassVar[str] = ""
    """Module that registers ``precision.build.apply_precision``."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if Lightning has no precision plugin for the combination."""
        if (self.parameters, self.compute) not in _LIGHTNING:
            supported = ", ".join(f"{parameters}/{compute}" for parameters, compute in _LIGHTNING)
            yield ConfigIssue(
                "precision.parameters",
                self.parameters.value,
                f"is not supported with precision.compute={self.compute}",
                f"supported pairs (parameters/compute) are {supported}",
            )
        if self.stochastic_rounding and self.parameters is not FloatFormat.bf16:
            reason = f"requires bf16 parameters; precision.parameters={self.parameters}"
            fix = "set precision=bf16_true, or precision.stochastic_rounding=false"
            yield ConfigIssue("precision.stochastic_rounding", True, reason, fix)

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each missing package."""
        yield from ()

    def fp8_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers with fp8 matmuls: none."""
        return ()

    @property
    def fp8_rate_share(self) -> float:
        """Rate of the fp8 matmuls, relative to those with a scale per tensor."""
        return 1.0

    @property
    def peak_kind(self) -> str:
        """Key of a hardware profile's peak FLOP/s for matmuls."""
        return "tf32" if self.compute is FloatFormat.fp32 and self.tf32 else self.compute.value

    def lightning_precision(self) -> LightningPrecision:
        """``precision`` argument of Lightning's Trainer."""
        return _LIGHTNING[self.parameters, self.compute]

    @property
    def matmul_precision(self) -> str:
        """Argument of ``torch.set_float32_matmul_precision``, for fp32 matmuls on CUDA."""
        return "high" if self.tf32 else "highest"


DIM_MULTIPLE = 16
"""Divisor of every dimension of an fp8 matmul on CUDA."""
ROWWISE_RATE_SHARE = 0.75
"""Rate of matmuls and casts with row-wise scales, relative to those with a scale per tensor.

On one H200, row-wise scales add 21.6 ms to a step with 65 ms of fp8 matmuls
(``experiments/records/h200/gpu.json``, ``mfu_8b/fp8_rowwise_4`` and ``mfu_8b/fp8_4``).
"""
FIRST_CAPABILITY = (8, 9)
"""Lowest compute capability of devices with fp8 matmuls."""


class ScalingRecipe(StrEnum):
    """Granularity of fp8 scales, by torchao's names."""

    tensorwise = "tensorwise"
    """One scale per tensor; gradients are e5m2 (5 exponent bits, 2 mantissa bits)."""
    rowwise = "rowwise"
    """One scale per row or column that a matmul sums over; scales are powers of two, gradients are
    e4m3."""


@register_option("precision", "fp8")
@dataclass(frozen=True)
class Float8(Precision):
    """Linear layers of blocks multiply in e4m3 (Micikevicius et al., 2022).

    Scales are computed from the current micro-batch. Weights and accumulation keep their types.
    """

    compute: FloatFormat = FloatFormat.bf16
    """Data type of all other matmuls and of activations stored for the backward pass."""
    recipe: ScalingRecipe = ScalingRecipe.tensorwise
    """Which elements share a scale."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues with combinations of data types."""
        yield from super().validate()
        if self.compute is FloatFormat.fp16:
            reason = "is not supported with fp8, whose gradients have no loss scale"
            yield ConfigIssue("precision.compute", "fp16", reason, "set precision.compute=bf16")

    @property
    def fp8_rate_share(self) -> float:
        """Rate of the fp8 matmuls, relative to those with a scale per tensor."""
        return ROWWISE_RATE_SHARE if self.recipe is ScalingRecipe.rowwise else 1.0

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield an issue if torchao is not installed."""
        if find_spec("torchao") is None:
            reason, fix = (
                "requires torchao, which is not installed",
                "pip install 'scalewise[quant]'",
            )
            yield ConfigIssue("precision", "fp8", reason, fix)

    def fp8_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers whose dimensions fp8 matmuls support."""
        linear = target_modules.linear_layers(model)
        blocks = (weight for weight in model.weight_census() if weight.layer is not None)
        sizes = {target_modules.layer_name(weight): weight.shape for weight in blocks}
        return tuple(
            name for name in linear if not any(size % DIM_MULTIPLE for size in sizes[name])
        )
