"""Configs of quantization: packed frozen matrices (QLoRA), and quantization-aware training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from math import ceil
from typing import ClassVar

from scalewise.adapters import target_modules
from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.config import weight_census as unpacked_census
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight, WeightGroup
from scalewise.registry import option_name, register_option

BLOCK_ELEMENTS = 64
"""Elements per scale."""
SCALES_PER_BLOCK = 256
"""Scales per second-level scale."""
FP32_BYTES = 4
"""Bytes of a scale, and of a 32-bit word."""
CODES_PER_WORD = 8
"""4-bit codes per exported 32-bit word."""


class QuantizationConfig:
    """Config of packed frozen matrices, or of trained matrices with fake quantization."""

    scale_bytes: float = 0.0
    """Temporary bytes of unpacked scales, per element of a matrix."""
    group: int = 0
    """Elements of a row per scale, with fake quantization."""
    rounds_inputs: bool = False
    """Whether inputs of fake-quantized matmuls are rounded as well."""
    supports_compile: ClassVar[bool] = True
    """Whether blocks with the quantized layers can be compiled."""
    implementation: ClassVar[str] = ""
    """Module that registers the builders of ``quantization.build``."""
    package: ClassVar[str] = ""
    """Package that the quantized layers import."""
    requirement: ClassVar[str] = ""
    """Argument of ``pip install`` that installs ``package``."""

    def packed_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the linear layers whose matrices are packed: none."""
        return ()

    def fake_quantized_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of the trained linear layers with fake quantization: none."""
        return ()

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Tensors that store a packed matrix, or an exported fake-quantized one."""
        return (weight,)

    def stored_weights(self, weight: Weight, model: ModelConfig) -> tuple[Weight, ...]:
        """Tensors that store a weight of an adapted model."""
        return self.packed_parts(weight) if self.is_packed(weight, model) else (weight,)

    def is_packed(self, weight: Weight, model: ModelConfig) -> bool:
        """Whether a weight of the model is a packed matrix."""
        return _is_layer_weight(weight, self.packed_layers(model))

    def is_fake_quantized(self, weight: Weight, model: ModelConfig) -> bool:
        """Whether a weight of the model is a fake-quantized matrix."""
        return _is_layer_weight(weight, self.fake_quantized_layers(model))

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue for each value out of range."""
        yield from ()

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yield an issue if ``package`` is not installed."""
        if self.package and find_spec(self.package) is None:
            reason = f"requires {self.package}, which is not installed"
            fix = f"pip install {self.requirement}"
            yield ConfigIssue("quantization", option_name(self), reason, fix)


def _is_layer_weight(weight: Weight, names: tuple[str, ...]) -> bool:
    """Whether a weight is the matrix of one of some layers of a block."""
    module, _, parameter = weight.name.rpartition(".")
    layer = module.removeprefix(f"blocks.{weight.layer}.")
    return weight.layer is not None and parameter == "weight" and layer in names


@register_option("quantization", "none")
@dataclass(frozen=True)
class NoQuantizationConfig(QuantizationConfig):
    """No quantization: frozen weights keep the data type of the parameters."""


@lru_cache(maxsize=64)
def weight_census(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> tuple[Weight, ...]:
    """All stored tensors of an adapted model; cached for the planner's search."""
    weights = unpacked_census(adapter, model)
    return tuple(
        tensor for weight in weights for tensor in quantization.stored_weights(weight, model)
    )


@lru_cache(maxsize=64)
def weight_census_by_kind(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> tuple[WeightGroup, WeightGroup]:
    """Stored tensors of one block, and those outside of blocks.

    All blocks are alike, except in models with unequal ones: then the block is the largest one.
    """
    weights = weight_census(quantization, adapter, model)
    block = WeightGroup(weight for weight in weights if weight.layer == 0)
    if blocks := weights_by_block(quantization, adapter, model):
        block = max(blocks, key=lambda group: sum(weight.numel for weight in group))
    return block, WeightGroup(weight for weight in weights if weight.layer is None)


@lru_cache(maxsize=64)
def has_frozen_weights(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> bool:
    """Whether most parameters of the model are frozen and an adapter is trained instead."""
    block, other = weight_census_by_kind(quantization, adapter, model)
    return not all(weight.trainable for weight in (*block, *other))


@lru_cache(maxsize=64)
def weights_by_block(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> tuple[WeightGroup, ...]:
    """Stored tensors of each block of a model with unequal blocks; empty for other models.

    They are named and numbered as those of block 0, so that equal blocks are equal.
    """
    if model.has_equal_blocks:
        return ()
    blocks: list[list[Weight]] = [[] for _ in range(model.layers)]
    for weight in weight_census(quantization, adapter, model):
        if weight.layer is not None:
            name = f"blocks.0.{weight.name.removeprefix(f'blocks.{weight.layer}.')}"
            blocks[weight.layer].append(replace(weight, name=name, layer=0))
    groups = [WeightGroup(block) for block in blocks]
    unique = {group: group for group in reversed(groups)}
    return tuple(unique[group] for group in groups)


class BitsAndBytesConfig(QuantizationConfig):
    """Packs the linear layers of all blocks, but not embeddings, norms and head."""

    implementation = "scalewise.quantization.packed_linear"
    package = requirement = "bitsandbytes"
    supports_compile = False

    def packed_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of all linear layers."""
        return target_modules.linear_layers(model)


def _byte_parts(weight: Weight, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Weight, ...]:
    """Parts of a packed weight, by the name that replaces ``weight``; elements are bytes."""
    prefix = weight.name.removesuffix("weight")
    return tuple(
        replace(weight, name=f"{prefix}{suffix}", shape=shape, element_bytes=1)
        for suffix, shape in shapes.items()
    )


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
        num_scales = ceil(weight.numel / BLOCK_ELEMENTS)
        second_level = (ceil(num_scales / SCALES_PER_BLOCK) + 1, FP32_BYTES)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (ceil(weight.numel / 2),),
            "scale": (num_scales,) if self.double else (num_scales, FP32_BYTES),
        }
        if self.double:
            shapes["scale_of_scales"] = second_level
        return _byte_parts(weight, shapes)


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
        shapes = {"weight": weight.shape, "scale": (weight.shape[0], FP32_BYTES)}
        return _byte_parts(weight, shapes)


@register_option("quantization", "qat_int4")
@dataclass(frozen=True)
class QATInt4Config(QuantizationConfig):
    """Quantization-aware training of int4 weights: linear layers of blocks, one scale per group.

    Parameters, gradients and optimizer state keep their data type, also in checkpoints. Each matmul
    rounds its weight, again in the backward pass, with a straight-through gradient (Bengio et al.,
    2013) except where values were clipped. An export stores integers. Embeddings, norms and head
    are not quantized.
    """

    group: int = 32
    """Number of consecutive elements of a weight that share a scale, in elements."""

    implementation = "scalewise.quantization.fake"
    package = "torchao"
    requirement = "'scalewise[quant]'"

    def fake_quantized_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, within a block, of all linear layers."""
        return target_modules.linear_layers(model)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an issue if groups do not fill the words in which they are exported."""
        if self.group < CODES_PER_WORD or self.group % CODES_PER_WORD:
            reason = f"must be a multiple of {CODES_PER_WORD}, the 4-bit codes per 32-bit word"
            if not self.group % CODES_PER_WORD:
                reason = f"must be {CODES_PER_WORD} or more"
            yield ConfigIssue("quantization.group", self.group, reason, "set quantization.group=32")

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Packed integers, eight per 32-bit word, and fp32 scales of groups."""
        out_features, in_features = weight.shape
        sizes = {"packed": in_features // CODES_PER_WORD, "scale": in_features // self.group}
        return tuple(
            replace(
                weight,
                name=f"{weight.name}_{suffix}",
                shape=(out_features, size),
                element_bytes=FP32_BYTES,
            )
            for suffix, size in sizes.items()
        )


@register_option("quantization", "qat_8da4w")
@dataclass(frozen=True)
class QAT8da4wConfig(QATInt4Config):
    """As ``qat_int4``, with inputs rounded to int8 with one range per token."""

    rounds_inputs = True
