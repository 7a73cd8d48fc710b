"""Construction, initialization and export of models, dispatched on the config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.lazy_dispatch import lazy_dispatch, not_registered
from scalewise.models.base import ModelConfig, StageSlice

if TYPE_CHECKING:
    from torch import Tensor

    from scalewise.models.base_module import ModelModule


@lazy_dispatch
def build_meta(config: ModelConfig, stage: StageSlice) -> ModelModule:
    """Module, or one stage of it, on the meta device.

    The full model maps ``tokens_BT`` to ``logits_BTV`` (B batch, T tokens, V vocabulary). A stage
    that is not first reads ``x_BTW`` (W features); one that is not last returns it. Parameter names
    of a stage are those of the full model.
    """
    raise not_registered(build_meta, config)


@lazy_dispatch
def init_weights(config: ModelConfig, module: ModelModule, seed: int) -> None:
    """Initialize a materialized module, sharded or not, from ``seed`` or pretrained weights.

    Raises:
        CheckpointError: The pretrained weights do not fit the model.
    """
    raise not_registered(init_weights, config)


@lazy_dispatch
def export_model(config: ModelConfig, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder that transformers loads, from an unsharded state dict in its dtype.

    Raises:
        ConfigError: transformers has no such model; nothing is written.
    """
    raise not_registered(export_model, config)


def build_model(config: ModelConfig, seed: int) -> ModelModule:
    """Full module on torch's default device, with initialized weights.

    Under ``torch.device("meta")`` the module stays on the meta device.
    """
    import torch  # configs with initial weights of their own import this module

    device = torch.get_default_device()
    module = build_meta(config, StageSlice(range(config.layers)))
    if device.type != "meta":
        module.to_empty(device=device)
        init_weights(config, module, seed)
    return module
