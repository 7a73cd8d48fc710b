"""Conversion of linear layers to fp8 by torchao, dispatched on the precision config."""

from __future__ import annotations

from dataclasses import replace

import torch

from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.lazy_dispatch import lazy_dispatch
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.precision.config import FIRST_CAPABILITY, Float8, Precision


@lazy_dispatch
def apply_precision(
    config: Precision, module: ModelModule, model: ModelConfig, device: DeviceKind
) -> None:
    """Replace layers by fp8 layers, in place: none."""


@apply_precision.register(Float8)
def convert_to_fp8(
    config: Float8, module: ModelModule, model: ModelConfig, device: DeviceKind
) -> None:
    """Convert the layers with torchao, in place; on the CPU, fp8 matmuls are emulated.

    Raises ``ConfigError`` if the CUDA device has no fp8 matmuls.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # slow import

    if device is DeviceKind.cuda and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        reason = f"{torch.cuda.get_device_name()} has no fp8 matmuls"
        raise ConfigError.for_key("precision", "fp8", reason, "set precision=bf16_mixed")
    names = config.fp8_layers(model)
    recipe = Float8LinearConfig.from_recipe_name(config.recipe.value)
    linear_config = replace(recipe, emulate=device is DeviceKind.cpu)
    for block in module.layers():
        convert_to_float8_training(
            block, module_filter_fn=lambda _, name: name in names, config=linear_config
        )
