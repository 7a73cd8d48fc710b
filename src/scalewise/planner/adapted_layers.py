"""Adapted layers of blocks, and sublayers before them, which need no gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from scalewise.adapters.config import AdapterConfig
from scalewise.adapters.target_modules import layer_name
from scalewise.models.base import ModelConfig, StageSlice, TPStyle
from scalewise.models.decoder.kinds import Residual

LAYER_STYLES = (
    TPStyle.column,
    TPStyle.row,
    TPStyle.partial_row,
    TPStyle.expert_column,
    TPStyle.expert_row,
    TPStyle.router,
)
"""Styles of the layers of a sublayer."""


@dataclass
class AdaptedSublayer:
    """Adapted layers of the attention or the feedforward of a block."""

    adapted_column_layers: int = 0
    """Number of column-parallel layers with LoRA."""
    adapted_row_layers: int = 0
    """Number of row-parallel layers with LoRA, which reduce their outputs."""
    adapted_partial_layers: int = 0
    """Number of layers of a mixture of experts with LoRA, whose products are partial sums."""
    scaled_layers: int = 0
    """Number of layers with learned scales (IA3)."""
    fully_trained_layers: int = 0
    """Number of layers trained in full."""
    trains_norm: bool = False
    """Whether the norm before them is trained."""
    trains_post_norm: bool = False
    """Whether the norm after them is trained."""
    has_prefix: bool = False
    """Whether there are learned prefix keys and values."""
    has_experts: bool = False
    """Whether it is a mixture of experts."""
    trains_experts: bool = False
    """Whether matrices of routed experts are adapted or trained in full."""

    @property
    def trains_before_output(self) -> bool:
        """Whether a weight before the output matmul, or a scale, is trained."""
        return bool(
            self.adapted_column_layers
            or self.adapted_partial_layers
            or self.scaled_layers
            or self.fully_trained_layers
            or self.has_prefix
        )

    @property
    def trains_after_output(self) -> bool:
        """Whether a weight after the sum of the output is trained."""
        return self.adapted_row_layers > 0 or self.trains_post_norm


AdaptedBlock = Mapping[str, AdaptedSublayer]
"""Adapted layers of attention and feedforward, in their order."""


@dataclass(frozen=True)
class FrozenSublayer:
    """Sublayer whose input needs no gradient."""

    block: int
    """Position of its block among those of the rank."""
    sublayer: AdaptedSublayer
    """Adapted layers."""

    @property
    def needs_output_gradient(self) -> bool:
        """Whether the output, before the sum over ranks, needs a gradient."""
        return self.sublayer.trains_before_output


def sublayers_without_gradient(
    blocks: Iterable[AdaptedBlock], residual: Residual
) -> Iterator[FrozenSublayer]:
    """Yield the first sublayers of a model, until the gradient of an input is needed."""
    for index, block in enumerate(blocks):
        needs_gradient = False
        for sublayer in block.values():
            if residual is Residual.sequential and needs_gradient:
                return
            trains_norm = sublayer.trains_norm
            if residual is Residual.parallel_one_norm:
                trains_norm = any(it.trains_norm for it in block.values())
            needs_gradient |= (
                trains_norm or sublayer.trains_before_output or sublayer.trains_after_output
            )
            if not trains_norm:
                yield FrozenSublayer(index, sublayer)
        if needs_gradient:
            return


@lru_cache(maxsize=64)
def adapted_blocks(
    adapter: AdapterConfig, model: ModelConfig, stages: tuple[StageSlice, ...]
) -> tuple[AdaptedBlock, ...]:
    """Return the adapted layers of each block of some pipeline stages."""
    layers = [layer for stage in stages for layer in stage.layers]
    if not model.expert_layers:
        return (_adapted_block(adapter, model, None),) * len(layers)
    return tuple(_adapted_block(adapter, model, layer) for layer in layers)


@lru_cache(maxsize=1024)
def _adapted_block(adapter: AdapterConfig, model: ModelConfig, index: int | None) -> AdaptedBlock:
    """Return the adapted layers of a block; ``index``: None if all have the same layers."""
    names = None
    if index is not None:
        names = {layer_name(weight) for weight in model.weight_census() if weight.layer == index}
    trained = adapter.fully_trained_modules(model)
    adapted, scaled = adapter.adapted_layers(model), adapter.scaled_layers(model)
    sublayers: dict[str, AdaptedSublayer] = {}
    for name, style in model.tensor_parallel_styles().items():
        prefix, _, layer = name.partition("blocks.*.")
        if prefix or style not in LAYER_STYLES or (names is not None and layer not in names):
            continue
        sublayer_name = layer.split(".")[0]
        sublayer = sublayers.setdefault(
            sublayer_name,
            AdaptedSublayer(
                trains_norm=f"{sublayer_name}_norm" in trained,
                trains_post_norm=f"{sublayer_name}_post_norm" in trained,
                has_prefix=adapter.prefix_tokens > 0 and sublayer_name == "attention",
            ),
        )
        is_adapted = layer in adapted
        sublayer.scaled_layers += layer in scaled
        sublayer.fully_trained_layers += layer in trained
        sublayer.adapted_column_layers += is_adapted and style is TPStyle.column
        sublayer.adapted_row_layers += is_adapted and style is TPStyle.row
        sublayer.adapted_partial_layers += is_adapted and style not in (
            TPStyle.column,
            TPStyle.row,
        )
        sublayer.has_experts |= style is TPStyle.router
        sublayer.trains_experts |= layer in model.expert_layers and layer in (*adapted, *trained)
    return sublayers
