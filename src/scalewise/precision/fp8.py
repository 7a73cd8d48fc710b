"""Config of fp8 training: linear layers whose operands are cast to 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.precision import FloatFormat, Precision
from scalewise.registry import register_option

DIM_MULTIPLE = 16
"""Divisor of every dimension of an fp8 matmul on CUDA."""
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

    implementation = "scalewise.precision.fp8_linear"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues with combinations of data types."""
        yield from super().validate()
        if self.compute is FloatFormat.fp16:
            reason = "is not supported with fp8, whose gradients have no loss scale"
            yield ConfigIssue("precision.compute", "fp16", reason, "set precision.compute=bf16")

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
