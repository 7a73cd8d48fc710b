"""Matrices that bitsandbytes packs, as specs: 4 bits scaled by blocks, 8 bits scaled by rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING

from scalewise.adapters import target_modules
from scalewise.config.registry import option_name, register_option
from scalewise.errors import ConfigError, ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.quantization.config import QuantizationConfig, replace_layers
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scalewise.models.base_module import ModelModule
    from scalewise.quantization.packed_linear import PackedLinear
    from scalewise.run_config import RunConfig

BLOCK = 64
"""Numbers that share a scale."""
SCALES = 256
"""Scales that share one of their own."""
FP32 = 4


class BitsAndBytesConfig(QuantizationConfig):
    """Packs the linear layers of all blocks; embeddings, norms and the head stay as they are."""

    def packed_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns every linear layer of a block."""
        return target_modules.linear_layers(model)

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what trains, cuts or reads the matrices themselves."""
        name = run.choices.get("quantization", option_name(self))
        layout = run.parallelism
        if not run.has_frozen_weights:
            reason = "packed matrices cannot be trained, and nothing else would be"
            yield ConfigIssue("quantization", name, reason, "add adapter=lora")
        elif run.adapter.reads_base_weights:
            chosen = run.choices.get("adapter", option_name(run.adapter))
            reason = f"is made of whole matrices, which quantization={name} packs"
            yield ConfigIssue("adapter", chosen, reason, "set adapter=lora")
        if both := {*run.adapter.fully_trained_modules(run.model)} & {
            *self.packed_layers(run.model)
        }:
            reason = f"describes {min(both)}, which quantization={name} packs"
            fix = "leave it out, or set quantization=none"
            yield ConfigIssue("adapter.trained", run.adapter.trained, reason, fix)
        if isinstance(layout, MeshConfig) and layout.sizes.get("tensor", 1) > 1:
            reason = f"would cut the matrices that quantization={name} packs whole"
            fix = "set parallelism=fsdp parallelism.tensor=1"
            yield ConfigIssue("parallelism.tensor", layout.sizes["tensor"], reason, fix)
        if isinstance(layout, DeepSpeedConfig):
            chosen = run.choices.get("parallelism", "deepspeed")
            reason = f"makes numbers of its own format of what quantization={name} packs"
            yield ConfigIssue("parallelism", chosen, reason, "set parallelism=fsdp")
        if run.compile.scope is not CompileScope.none:
            reason = f"bitsandbytes, which unpacks for quantization={name}, is not compiled"
            yield ConfigIssue("compile", str(run.compile.scope), reason, "set compile=none")

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields that bitsandbytes is not installed."""
        if find_spec("bitsandbytes") is None:
            reason, fix = "needs bitsandbytes, which is not installed", "pip install bitsandbytes"
            yield ConfigIssue("quantization", option_name(self), reason, fix)

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Puts layers that pack what is put into them in the place of the linear ones.

        Raises ``ConfigError`` without bitsandbytes.
        """
        if issues := [*self.validate_machine()]:
            raise ConfigError(issues)

        def packing(held: nn.Linear) -> nn.Module:
            out, into = held.weight.shape
            return self.build_layer(into, out, bias=held.bias is not None)

        replace_layers(module, self.packed_layers(model), packing)

    @abstractmethod
    def build_layer(self, in_features: int, out_features: int, *, bias: bool) -> PackedLinear:
        """Returns a layer on the meta device."""

    def unpack_state_dict(
        self, state: Mapping[str, Tensor], model: ModelConfig
    ) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint with every matrix whole, in fp32 where packed."""
        found = dict(state)
        for weight in filter(lambda weight: self.is_packed(weight, model), model.weight_census()):
            layer = self._build_layer_like(weight)
            held = {
                part.name.rpartition(".")[2]: found.pop(part.name)
                for part in self.packed_parts(weight)
            }
            layer.load_state_dict(held, assign=True)
            found[weight.name] = _full_weight(layer)
        return found

    def round_state_dict(
        self, state: Mapping[str, Tensor], model: ModelConfig
    ) -> dict[str, Tensor]:
        """Returns a model's tensors as packing leaves them, in fp32 where packed."""
        found = dict(state)
        for weight in filter(lambda weight: self.is_packed(weight, model), model.weight_census()):
            layer = self._build_layer_like(weight).to_empty(device=found[weight.name].device)
            layer.pack(found[weight.name])
            found[weight.name] = _full_weight(layer)
        return found

    def _build_layer_like(self, weight: Weight) -> PackedLinear:
        out, into = weight.shape
        return self.build_layer(into, out, bias=False)


def _full_weight(layer: PackedLinear) -> Tensor:
    import torch

    return layer.unpack(torch.float32)


@dataclass(frozen=True)
class FourBitConfig(BitsAndBytesConfig):
    """4-bit codes with one scale per block (QLoRA; Dettmers et al., 2023, section 3)."""

    double: bool = True
    """Whether the scales are quantized to 8 bits too: 4.13 instead of 4.5 bits per parameter."""

    code = ""
    """What bitsandbytes calls the 16 values."""

    @property
    def scale_bytes(self) -> float:  # type: ignore[override]  # of a dataclass
        """Returns the bytes of a number: unpacked scales, and those before their mean is added."""
        return 2 * FP32 / BLOCK if self.double else 0.0

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns the codes, their scales and, of scales that are packed, theirs and the mean."""
        stem = weight.name.removesuffix("weight")
        scales = ceil(weight.numel / BLOCK)
        of_scales = (ceil(scales / SCALES) + 1, FP32)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (ceil(weight.numel / 2),),
            "scale": (scales,) if self.double else (scales, FP32),
        }
        if self.double:
            shapes["scale_of_scales"] = of_scales
        return tuple(
            replace(weight, name=f"{stem}{kind}", shape=shape, element_bytes=1)
            for kind, shape in shapes.items()
        )

    def build_layer(self, in_features: int, out_features: int, *, bias: bool) -> PackedLinear:
        """Returns a layer on the meta device."""
        from scalewise.quantization.packed_linear import FourBitLinear

        return FourBitLinear(
            in_features, out_features, bias=bias, code=self.code, packs_scales=self.double
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
        """Yields figures out of range."""
        if not self.threshold >= 0:
            fix = "set quantization.threshold=6.0, or 0"
            yield ConfigIssue("quantization.threshold", self.threshold, "is below zero", fix)

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns the numbers and the scale of each row."""
        stem = weight.name.removesuffix("weight")
        shapes = {"weight": weight.shape, "scale": (weight.shape[0], FP32)}
        return tuple(
            replace(weight, name=f"{stem}{kind}", shape=shape, element_bytes=1)
            for kind, shape in shapes.items()
        )

    def build_layer(self, in_features: int, out_features: int, *, bias: bool) -> PackedLinear:
        """Returns a layer on the meta device."""
        from scalewise.quantization.packed_linear import Int8Linear

        return Int8Linear(in_features, out_features, bias=bias, threshold=self.threshold)
