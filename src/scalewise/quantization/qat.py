"""Matrices that are trained to be integers (Jacob et al., 2018, section 3), as specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING

from scalewise.adapters import target_modules
from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.models.decoder.config import LLAMA_SHAPE, DecoderConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.quantization.config import QuantizationConfig, replace_layers
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from torch import nn

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig

PER_WORD = 8
"""Integers of 4 bits that are exported in one of 32."""
FP32 = 4
"""Bytes of a scale, and of such an integer."""


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

    def fake_quantized_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns every linear layer of a block."""
        return target_modules.linear_layers(model)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields groups that do not fill the integers in which they are exported."""
        if self.group < PER_WORD or self.group % PER_WORD:
            reason = f"is no multiple of {PER_WORD}, the integers that one of 32 bits holds"
            if not self.group % PER_WORD:
                reason = f"must be {PER_WORD} or more"
            yield ConfigIssue("quantization.group", self.group, reason, "set quantization.group=32")

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what trains something else, or cuts what shares a scale."""
        name = run.choices.get("quantization", option_name(self))
        layout, model = run.parallelism, run.model
        if isinstance(model, DecoderConfig):
            yield from self._validate_field(model, name)
        yield from self._validate_groups(model)
        if run.has_frozen_weights:
            chosen = run.choices.get("adapter", option_name(run.adapter))
            reason = f"freezes the matrices that quantization={name} is to train"
            fix = "set adapter=none, or quantization=nf4"
            yield ConfigIssue("adapter", chosen, reason, fix)
        if run.precision.fp8_layers(model):
            chosen = run.choices.get("precision", "fp8")
            reason = f"rounds to floating-point numbers what quantization={name} rounds to integers"
            yield ConfigIssue("precision", chosen, reason, "set precision=bf16_mixed")
        if isinstance(layout, MeshConfig) and layout.sizes.get("tensor", 1) > 1:
            reason = f"would give every rank's part of a row a scale of its own in {name}"
            fix = "set parallelism=fsdp parallelism.tensor=1"
            yield ConfigIssue("parallelism.tensor", layout.sizes["tensor"], reason, fix)
        if isinstance(layout, DeepSpeedConfig):
            chosen = run.choices.get("parallelism", "deepspeed")
            reason = f"has no place in its ledger for what quantization={name} rounds"
            yield ConfigIssue("parallelism", chosen, reason, "set parallelism=fsdp")

    def _validate_field(self, model: DecoderConfig, name: str) -> Iterator[ConfigIssue]:
        for field, wanted in LLAMA_SHAPE.items():
            if (held := getattr(model, field)) != wanted:
                reason = f"is not Llama's, whose form quantization={name} is exported in"
                fix = f"set {format_override(f'model.{field}', wanted)}"
                yield ConfigIssue(f"model.{field}", held, reason, fix)

    def _validate_groups(self, model: ModelConfig) -> Iterator[ConfigIssue]:
        rounded = (
            weight for weight in model.weight_census() if self.is_fake_quantized(weight, model)
        )
        read = {weight.shape[1] for weight in rounded}
        if undivided := sorted(size for size in read if size % self.group):
            reason = f"does not divide {undivided[0]}, the features that a linear layer reads"
            fitting = (n for n in (128, 64, 32, 16, 8) if n <= self.group and not gcd(*read) % n)
            smaller = next(fitting, None)
            fix = f"set quantization.group={smaller}" if smaller else "set quantization=none"
            yield ConfigIssue("quantization.group", self.group, reason, fix)

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields that torchao is not installed."""
        if find_spec("torchao") is None:
            reason, fix = "needs torchao, which is not installed", "pip install 'scalewise[quant]'"
            yield ConfigIssue("quantization", option_name(self), reason, fix)

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns the integers, eight in one of 32 bits, and the scale of each group, in fp32."""
        out, into = weight.shape
        sizes = {"packed": into // PER_WORD, "scale": into // self.group}
        return tuple(
            replace(weight, name=f"{weight.name}_{kind}", shape=(out, size), element_bytes=FP32)
            for kind, size in sizes.items()
        )

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Puts layers that round in the place of the linear ones."""
        from scalewise.quantization.fake import FakeQuantizedLinear

        def rounding(held: nn.Linear) -> nn.Module:
            out, into = held.weight.shape
            return FakeQuantizedLinear(into, out, self.group, rounds_inputs=self.rounds_inputs)

        replace_layers(module, self.fake_quantized_layers(model), rounding)


@register_option("quantization", "qat_8da4w")
@dataclass(frozen=True)
class QAT8da4wConfig(QATInt4Config):
    """As ``qat_int4``, with inputs rounded to int8 with one range per token."""

    rounds_inputs = True
