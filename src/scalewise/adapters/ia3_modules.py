"""PEFT's (IA)^3 layers in a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import IA3Config, inject_adapter_in_model
from peft.tuners.ia3 import IA3Layer
from torch import Tensor, nn

from scalewise.adapters.build import apply_adapter, init_adapter, merge_adapter
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_modules import full_names, unfreeze_modules
from scalewise.adapters.target_modules import DEFAULT
from scalewise.models.base import ModelConfig, TPStyle
from scalewise.models.base_module import ModelModule
from scalewise.models.init import local_tensor


class ShardedScales(nn.ParameterDict):
    """Scales of a layer; under tensor parallelism, a lookup gives this rank's shard."""

    def __getitem__(self, key: str) -> Tensor:
        """Local shard of a scale vector."""
        tensor: Tensor = super().__getitem__(key)
        return local_tensor(tensor)


@apply_adapter.register(IA3AdapterConfig)
def apply_ia3(adapter: IA3AdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace target layers by PEFT's layers and freeze all other parameters, in place.

    Row-parallel layers get scaled inputs, all others scaled outputs.
    """
    tp_styles, names = model.tensor_parallel_styles(), adapter.scaled_layers(model)
    row_parallel = [name for name in names if tp_styles[f"blocks.*.{name}"] is TPStyle.row]
    config = IA3Config(
        target_modules=full_names(module, names),
        feedforward_modules=full_names(module, row_parallel),
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, module)
    for layer in module.modules():
        if isinstance(layer, IA3Layer):
            layer.ia3_l = ShardedScales(layer.ia3_l)
    unfreeze_modules(module, adapter.fully_trained_modules(model))


@init_adapter.register(IA3AdapterConfig)
@torch.no_grad()
def init_scales(adapter: IA3AdapterConfig, module: ModelModule, seed: int) -> None:
    """Set all scales to one."""
    for name, parameter in module.named_parameters():
        if name.endswith(f".ia3_l.{DEFAULT}"):
            nn.init.ones_(parameter)


@merge_adapter.register(IA3AdapterConfig)
def merge_ia3(
    adapter: IA3AdapterConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Weights of the model, multiplied by their scales.

    Products are computed in fp32 and rounded once to the data type of the weight.
    """
    merged = {weight.name: state[weight.name] for weight in model.weight_census()}
    for name, base_weight in merged.items():
        scales = state.get(f"{name.rpartition('.')[0]}.ia3_l.{DEFAULT}")
        if scales is None:
            continue
        if base_weight.ndim == 2:  # (out, 1) or (1, in)
            merged[name] = (base_weight.float() * scales.float()).to(base_weight.dtype)
        elif scales.shape[1] == 1:
            merged[name] = (base_weight.float() * scales.float().flatten()).to(base_weight.dtype)
    return merged
