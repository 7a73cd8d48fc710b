"""PEFT's scaled layers inside a model that is still on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import IA3Config, inject_adapter_in_model
from peft.tuners.ia3 import IA3Layer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scalewise.adapters.lora_modules import DEFAULT, full_names
from scalewise.models.base import ModelConfig, TPStyle
from scalewise.models.base_module import ModelModule


class ShardedScales(nn.ParameterDict):
    """The scales of a layer, of which tensor parallelism leaves a rank those of its features."""

    def __getitem__(self, key: str) -> Tensor:
        """Returns what this rank holds."""
        tensor: Tensor = super().__getitem__(key)
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def inject_ia3(module: ModelModule, names: Mapping[str, TPStyle]) -> None:
    """Puts PEFT's layers in the place of the targets; all else is frozen from here on.

    Layers that are cut by their inputs have these scaled, others their outputs.
    """
    rows = [name for name, how in names.items() if how is TPStyle.row]
    config = IA3Config(
        target_modules=full_names(module, list(names)),
        feedforward_modules=full_names(module, rows),
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, module)
    for layer in module.modules():
        if isinstance(layer, IA3Layer):
            layer.ia3_l = ShardedScales(layer.ia3_l)


@torch.no_grad()
def init_scales(module: ModelModule) -> None:
    """Makes every scale one."""
    for name, parameter in module.named_parameters():
        if name.endswith(f".ia3_l.{DEFAULT}"):
            nn.init.ones_(parameter)


def merge_ia3(state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Returns the model's own weights, multiplied by their scales.

    It is computed in fp32 and rounded once, to the weight's format.
    """
    whole = {weight.name: state[weight.name] for weight in model.weight_census()}
    for name, held in whole.items():
        scales = state.get(f"{name.rpartition('.')[0]}.ia3_l.{DEFAULT}")
        if scales is None:
            continue
        if held.ndim == 2:  # (out, 1) or (1, in)
            whole[name] = (held.float() * scales.float()).to(held.dtype)
        elif scales.shape[1] == 1:
            whole[name] = (held.float() * scales.float().flatten()).to(held.dtype)
    return whole
