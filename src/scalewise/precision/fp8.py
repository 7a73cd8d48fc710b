"""Linear layers whose operands are cast to 8 bits (torchao), as a spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from scalewise.adapters import target_modules
from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.hardware import DeviceKind
from scalewise.models.base import ModelConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat, Precision

if TYPE_CHECKING:
    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

DIM_MULTIPLE = 16
"""What divides every size of a product of 8-bit numbers on CUDA."""
FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first devices that have such products."""


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
        """Yields formats that do not go together."""
        yield from super().validate()
        if self.compute is FloatFormat.fp16:
            reason = "has no room for gradients beside those of 8 bits, which are not scaled for it"
            yield ConfigIssue("precision.compute", "fp16", reason, "set precision.compute=bf16")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields devices, shapes and layouts that torchao's layers do not go with."""
        layout, chosen = run.parallelism, run.choices.get("precision", "fp8")
        if run.hardware.fp8_tflops == 0:
            reason = f"{run.hardware.match or 'the device'} has no fp8 products"
            yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
        if run.data.sequence % DIM_MULTIPLE:
            reason = f"is not divisible by {DIM_MULTIPLE}, and fp8 products sum over tokens"
            fix = f"set data.sequence={max(1, run.data.sequence // DIM_MULTIPLE) * DIM_MULTIPLE}"
            yield ConfigIssue("data.sequence", run.data.sequence, reason, fix)
        if not self.fp8_layers(run.model):
            reason = f"no linear layer of the model has features that {DIM_MULTIPLE} divides"
            yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
        if run.has_frozen_weights:
            adapter = run.choices.get("adapter", option_name(run.adapter))
            reason = "freezes matrices, whose gradients torchao's fp8 layers make all the same"
            yield ConfigIssue("adapter", adapter, reason, "set precision=bf16_mixed")
        if isinstance(layout, MeshConfig):
            for axis in ("tensor", "context"):
                if (ranks := layout.sizes.get(axis, 1)) > 1:
                    reason = "would give every rank's part of a row a scale of its own in fp8"
                    fix = f"set parallelism=fsdp parallelism.{axis}=1"
                    yield ConfigIssue(f"parallelism.{axis}", ranks, reason, fix)
        if isinstance(layout, DeepSpeedConfig):
            option = run.choices.get("parallelism", "deepspeed")
            reason = "casts weights by itself, and knows nothing of fp8"
            yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp")

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields that torchao is not installed."""
        if find_spec("torchao") is None:
            reason, fix = "needs torchao, which is not installed", "pip install 'scalewise[quant]'"
            yield ConfigIssue("precision", "fp8", reason, fix)

    def fp8_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the linear layers of a block whose features can be multiplied in 8 bits."""
        linear = target_modules.linear_layers(model)
        blocks = (weight for weight in model.weight_census() if weight.layer is not None)
        sizes = {target_modules.layer_name(weight): weight.shape for weight in blocks}
        return tuple(
            name for name in linear if not any(size % DIM_MULTIPLE for size in sizes[name])
        )

    def apply(self, module: ModelModule, model: ModelConfig, device: DeviceKind) -> None:
        """Has torchao convert the layers, emulated on the CPU.

        Raises ``ConfigError`` where the CUDA device has no products in 8 bits.
        """
        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if device is DeviceKind.cuda and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
            reason = f"{torch.cuda.get_device_name()} has no fp8 products"
            raise ConfigError.for_key("precision", "fp8", reason, "set precision=bf16_mixed")
        names = self.fp8_layers(model)
        recipe = Float8LinearConfig.from_recipe_name(self.recipe.value)
        config = replace(recipe, emulate=device is DeviceKind.cpu)
        for block in module.layers():
            convert_to_float8_training(
                block, module_filter_fn=lambda _, name: name in names, config=config
            )
