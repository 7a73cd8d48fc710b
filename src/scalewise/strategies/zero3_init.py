"""Model construction for ZeRO-3, layer by layer: no rank ever stores the full model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scalewise.adapters.build import apply_adapter
from scalewise.checkpoints import adapter_resume
from scalewise.compat.deepspeed import parameter_group
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta
from scalewise.objectives.losses import set_chunked_loss
from scalewise.precision import FloatFormat
from scalewise.strategies.activation_checkpointing import apply_checkpointing

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


def iter_layers(run: RunConfig, device: torch.device) -> Iterator[nn.Module]:
    """Initialized parts of the model with one layer each; values are those of other strategies."""
    for stage_slice in run.model.split_stages(run.model.layers, run.data.sequence):
        module = build_meta(run.model, stage_slice)
        apply_adapter(run.adapter, module, run.model)
        module.to_empty(device=device)
        adapter_resume.init_parameters(module, run.model, run.adapter, run.seed)
        yield module


def build_zero3_sharded(run: RunConfig, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Build the model with this rank's partition of every parameter."""
    from deepspeed import zero

    all_layers, swapper = StageSlice(range(run.model.layers)), None
    model = build_meta(run.model, all_layers)
    apply_adapter(run.adapter, model, run.model)
    for layer_module in iter_layers(run, device):
        if run.precision.compute is FloatFormat.bf16:
            for parameter in layer_module.parameters():
                parameter.data = parameter.data.bfloat16()
        tensors = {**dict(layer_module.named_parameters()), **dict(layer_module.named_buffers())}
        swapper = zero.Init(
            module=layer_module,
            config_dict_or_path=config,
            zero_param_parallel_group=parameter_group(),
            param_swapper=swapper,
        ).param_swapper
        for name, tensor in tensors.items():
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, tensor)
    for layer in model.modules():
        if hasattr(layer, "base_layer"):  # an adapter layer reads parameters of its base layer
            for parameter in layer.parameters():
                zero.register_external_parameter(layer, parameter)
    set_chunked_loss(run.objective, model, in_forward=run.computes_loss_gradients_in_forward)
    apply_checkpointing(run.memory, model, all_layers)
    return model
