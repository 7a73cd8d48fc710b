"""Configs of quantization-aware training (Jacob et al., 2018, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.models.decoder.config import LLAMA_SHAPE, DecoderConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.quantization.config import QuantizationConfig
from scalewise.registry import option_name, register_option
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

CODES_PER_WORD = 8
"""4-bit codes per exported 32-bit word."""
FP32_BYTES = 4
"""Bytes of a scale, and of a word."""


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

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield issues with parts that freeze matrices, or shard elements with a common scale."""
        name = run.choices.get("quantization", option_name(self))
        parallelism, model = run.parallelism, run.model
        if isinstance(model, DecoderConfig):
            yield from self._validate_field(model, name)
        yield from self._validate_groups(model)
        if run.has_frozen_weights:
            option = run.choices.get("adapter", option_name(run.adapter))
            reason = f"freezes the matrices that quantization={name} trains"
            fix = "set adapter=none, or quantization=nf4"
            yield ConfigIssue("adapter", option, reason, fix)
        if run.precision.fp8_layers(model):
            option = run.choices.get("precision", "fp8")
            reason = f"casts to fp8 the operands that quantization={name} rounds to integers"
            yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
        if isinstance(parallelism, MeshConfig) and parallelism.sizes.get("tensor", 1) > 1:
            reason = f"would compute quantization scales per rank instead of per group in {name}"
            fix = "set parallelism=fsdp parallelism.tensor=1"
            yield ConfigIssue("parallelism.tensor", parallelism.sizes["tensor"], reason, fix)
        if isinstance(parallelism, DeepSpeedConfig):
            option = run.choices.get("parallelism", "deepspeed")
            reason = f"is not supported with quantization={name}"
            yield ConfigIssue("parallelism", option, reason, "set parallelism=fsdp")

    def _validate_field(self, model: DecoderConfig, name: str) -> Iterator[ConfigIssue]:
        for field, llama_value in LLAMA_SHAPE.items():
            if (value := getattr(model, field)) != llama_value:
                reason = f"differs from Llama, whose format quantization={name} is exported in"
                fix = f"set {format_override(f'model.{field}', llama_value)}"
                yield ConfigIssue(f"model.{field}", value, reason, fix)

    def _validate_groups(self, model: ModelConfig) -> Iterator[ConfigIssue]:
        weights = (
            weight for weight in model.weight_census() if self.is_fake_quantized(weight, model)
        )
        input_sizes = {weight.shape[1] for weight in weights}
        if indivisible := sorted(size for size in input_sizes if size % self.group):
            reason = (
                f"does not divide {indivisible[0]}, the number of input features of a linear layer"
            )
            divisors = (
                divisor
                for divisor in (128, 64, 32, 16, 8)
                if divisor <= self.group and not gcd(*input_sizes) % divisor
            )
            group = next(divisors, None)
            fix = f"set quantization.group={group}" if group else "set quantization=none"
            yield ConfigIssue("quantization.group", self.group, reason, fix)

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
