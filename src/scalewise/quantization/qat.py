"""Configs of quantization-aware training (Jacob et al., 2018, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalewise.adapters import target_modules
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.quantization.config import QuantizationConfig
from scalewise.registry import register_option

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
