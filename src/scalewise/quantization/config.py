"""Base class of quantization configs, and weight census of a quantized model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import ClassVar

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.config import weight_census as unpacked_census
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight
from scalewise.registry import option_name, register_option


class QuantizationConfig:
    """Config of packed frozen matrices, or of trained matrices with fake quantization."""

    scale_bytes: float = 0.0
    """Temporary bytes of unpacked scales, per element of a matrix."""
    group: int = 0
    """Elements of a row per scale, with fake quantization."""
    rounds_inputs: bool = False
    """Whether inputs of fake-quantized matmuls are rounded as well."""
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
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Stored tensors of one block, as all blocks are alike, and those outside of blocks."""
    weights = weight_census(quantization, adapter, model)
    block = tuple(weight for weight in weights if weight.layer == 0)
    return block, tuple(weight for weight in weights if weight.layer is None)
