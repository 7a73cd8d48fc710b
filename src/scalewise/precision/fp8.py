"""Config of fp8 training: linear layers whose operands are cast to 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat, Precision
from scalewise.registry import option_name, register_option

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

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

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield issues with devices, shapes and strategies that torchao's layers do not support."""
        parallelism, option = run.parallelism, run.choices.get("precision", "fp8")
        if run.hardware.fp8_tflops == 0:
            reason = f"{run.hardware.match or 'the device'} has no fp8 matmuls"
            yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
        if run.data.sequence % DIM_MULTIPLE:
            reason = f"is not divisible by {DIM_MULTIPLE}, which fp8 matmuls over tokens require"
            fix = f"set data.sequence={max(1, run.data.sequence // DIM_MULTIPLE) * DIM_MULTIPLE}"
            yield ConfigIssue("data.sequence", run.data.sequence, reason, fix)
        if not self.fp8_layers(run.model):
            reason = f"the model has no linear layer with dimensions divisible by {DIM_MULTIPLE}"
            yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
        if run.has_frozen_weights:
            adapter = run.choices.get("adapter", option_name(run.adapter))
            reason = "freezes matrices, whose gradients torchao's fp8 layers compute all the same"
            yield ConfigIssue("adapter", adapter, reason, "set precision=bf16_mixed")
        if isinstance(parallelism, MeshConfig):
            for axis in ("tensor", "context"):
                if (ranks := parallelism.sizes.get(axis, 1)) > 1:
                    reason = "would compute fp8 scales per rank instead of per tensor or row"
                    fix = f"set parallelism=fsdp parallelism.{axis}=1"
                    yield ConfigIssue(f"parallelism.{axis}", ranks, reason, fix)
        if isinstance(parallelism, DeepSpeedConfig):
            parallelism_option = run.choices.get("parallelism", "deepspeed")
            reason = "casts parameters itself and does not support fp8"
            yield ConfigIssue("parallelism", parallelism_option, reason, "set parallelism=fsdp")

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
