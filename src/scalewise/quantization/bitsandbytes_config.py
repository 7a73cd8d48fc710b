"""Configs of packed matrices by bitsandbytes: 4 bits per block, 8 bits per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.quantization.config import QuantizationConfig
from scalewise.registry import register_option

BLOCK_ELEMENTS = 64
"""Elements per scale."""
SCALES_PER_BLOCK = 256
"""Scales per second-level scale."""
FP32_BYTES = 4


class BitsAndBytesConfig(QuantizationConfig):
    """Packs the linear layers of all blocks, but not embeddings, norms and head."""

    implementation = "scalewise.quantization.packed_linear"
    package = requirement = "bitsandbytes"

    def packed_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of all linear layers."""
        return target_modules.linear_layers(model)


@dataclass(frozen=True)
class FourBitConfig(BitsAndBytesConfig):
    """4-bit codes with one scale per block (QLoRA; Dettmers et al., 2023, section 3)."""

    double: bool = True
    """Whether the scales are quantized to 8 bits too: 4.13 instead of 4.5 bits per parameter."""

    code = ""
    """bitsandbytes' name of the 16 code values."""

    @property
    def scale_bytes(self) -> float:  # type: ignore[override]  # read only
        """Temporary bytes per element: fp32 scales, before and after their mean is added."""
        return 2 * FP32_BYTES / BLOCK_ELEMENTS if self.double else 0.0

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Codes, scales and, with ``double``, the scales and the mean of the scales."""
        prefix = weight.name.removesuffix("weight")
        num_scales = ceil(weight.numel / BLOCK_ELEMENTS)
        second_level = (ceil(num_scales / SCALES_PER_BLOCK) + 1, FP32_BYTES)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (ceil(weight.numel / 2),),
            "scale": (num_scales,) if self.double else (num_scales, FP32_BYTES),
        }
        if self.double:
            shapes["scale_of_scales"] = second_level
        return tuple(
            replace(weight, name=f"{prefix}{suffix}", shape=shape, element_bytes=1)
            for suffix, shape in shapes.items()
        )


@register_option("quantization", "nf4")
@dataclass(frozen=True)
class NF4Config(FourBitConfig):
    """4-bit NormalFloat: code values are quantiles of a normal distribution."""

    code = "nf4"


@register_option("quantization", "fp4")
@dataclass(frozen=True)
class FP4Config(FourBitConfig):
    """4-bit floating point: sign, exponent bits and mantissa."""

    code = "fp4"


@register_option("quantization", "int8")
@dataclass(frozen=True)
class Int8Config(BitsAndBytesConfig):
    """8-bit weights with one scale per output, int8 matmuls on CUDA (Dettmers et al., 2022)."""

    threshold: float = 6.0
    """Outlier threshold: features with a larger input are multiplied in 16 bits on CUDA; 0: no
    outliers."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if the threshold is negative."""
        if not self.threshold >= 0:
            fix = "set quantization.threshold=6.0, or 0"
            yield ConfigIssue("quantization.threshold", self.threshold, "must be 0 or more", fix)

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Integers, and the scale of each row."""
        prefix = weight.name.removesuffix("weight")
        shapes = {"weight": weight.shape, "scale": (weight.shape[0], FP32_BYTES)}
        return tuple(
            replace(weight, name=f"{prefix}{suffix}", shape=shape, element_bytes=1)
            for suffix, shape in shapes.items()
        )
