"""Quantization of modules and state dicts, dispatched on the quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scalewise.errors import ConfigError
from scalewise.lazy_dispatch import lazy_dispatch
from scalewise.models.base import ModelConfig
from scalewise.quantization.config import QuantizationConfig

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule


def apply_quantization(config: QuantizationConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace linear layers by quantized ones, in place, on the meta device.

    Raises ``ConfigError`` if a package is not installed.
    """
    if issues := [*config.validate_machine()]:
        raise ConfigError(issues)
    replace_linears(config, module, model)


@lazy_dispatch
def replace_linears(config: QuantizationConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace linear layers by quantized ones, in place, on the meta device: none."""


@lazy_dispatch
def unpack_state_dict(
    config: QuantizationConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Tensors of a checkpoint with packed matrices dequantized to fp32."""
    return dict(state)


@lazy_dispatch
def round_state_dict(
    config: QuantizationConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Tensors of a model with matrices quantized and dequantized to fp32."""
    return dict(state)
