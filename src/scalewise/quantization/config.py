"""What every quantization answers: which matrices it packs or rounds, and what it holds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.config import weight_census as unpacked_census
from scalewise.config.registry import register_option
from scalewise.errors import ConfigIssue
from scalewise.models.base import ModelConfig, Weight

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scalewise.models.base_module import ModelModule
    from scalewise.run_config import RunConfig


class QuantizationConfig:
    """How frozen matrices are held, or to which integers trained ones are rounded, as a spec."""

    scale_bytes: float = 0.0
    """Bytes of a number of the matrix that its scales take while they are unpacked."""
    group: int = 0
    """Numbers of a row that share a scale, where matrices are rounded for each product."""
    rounds_inputs: bool = False
    """Whether what such a matrix multiplies is rounded as well."""

    def packed_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the linear layers whose matrices are packed, by name within a block: none."""
        return ()

    def fake_quantized_layers(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns those whose matrices are trained, and rounded for each product: none."""
        return ()

    def packed_parts(self, weight: Weight) -> tuple[Weight, ...]:
        """Returns what is held of a matrix that is packed, or exported of one that is rounded."""
        return (weight,)

    def stored_weights(self, weight: Weight, model: ModelConfig) -> tuple[Weight, ...]:
        """Returns what is held of any weight of an adapted model."""
        return self.packed_parts(weight) if self.is_packed(weight, model) else (weight,)

    def is_packed(self, weight: Weight, model: ModelConfig) -> bool:
        """Returns whether a weight of the model is one of the packed matrices."""
        return _is_layer_weight(weight, self.packed_layers(model))

    def is_fake_quantized(self, weight: Weight, model: ModelConfig) -> bool:
        """Returns whether a weight of the model is one of the matrices rounded for a product."""
        return _is_layer_weight(weight, self.fake_quantized_layers(model))

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields figures out of range."""
        yield from ()

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what packed or rounded matrices do not go with."""
        yield from ()

    def validate_machine(self) -> Iterator[ConfigIssue]:
        """Yields packages that are not installed."""
        yield from ()

    def apply(self, module: ModelModule, model: ModelConfig) -> None:
        """Puts layers that pack or round in the place of others, on the meta device: none."""

    def unpack_state_dict(
        self, state: Mapping[str, Tensor], model: ModelConfig
    ) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint with every matrix whole, in fp32 where packed."""
        return dict(state)

    def round_state_dict(
        self, state: Mapping[str, Tensor], model: ModelConfig
    ) -> dict[str, Tensor]:
        """Returns a model's tensors as packing leaves them, in fp32 where packed."""
        return dict(state)


def replace_layers(
    module: ModelModule, names: Iterable[str], build_layer: Callable[[nn.Linear], nn.Module]
) -> None:
    """Puts what is made of each of these linear layers, on the meta device, in its place."""
    from torch import nn

    for block in module.layers():
        for name in names:
            held = block.get_submodule(name)
            assert isinstance(held, nn.Linear)
            block.set_submodule(name, build_layer(held))


def _is_layer_weight(weight: Weight, names: tuple[str, ...]) -> bool:
    """Returns whether a weight is the matrix of one of these layers of a block."""
    module, _, kind = weight.name.rpartition(".")
    inside = module.removeprefix(f"blocks.{weight.layer}.")
    return weight.layer is not None and kind == "weight" and inside in names


@register_option("quantization", "none")
@dataclass(frozen=True)
class NoQuantizationConfig(QuantizationConfig):
    """No quantization: frozen weights keep the data type of the parameters."""


@lru_cache(maxsize=64)
def weight_census(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> tuple[Weight, ...]:
    """Returns every tensor that is held of an adapted model; a search asks a thousand times."""
    weights = unpacked_census(adapter, model)
    return tuple(part for weight in weights for part in quantization.stored_weights(weight, model))


@lru_cache(maxsize=64)
def weight_census_by_kind(
    quantization: QuantizationConfig, adapter: AdapterConfig, model: ModelConfig
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Returns the weights of one block, all blocks being alike, and those outside of blocks."""
    whole = weight_census(quantization, adapter, model)
    block = tuple(weight for weight in whole if weight.layer == 0)
    return block, tuple(weight for weight in whole if weight.layer is None)
