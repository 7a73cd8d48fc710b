"""ZeRO-3's model, made layer by layer: no rank ever holds the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scalewise.models.base import StageSlice
from scalewise.precision import FloatFormat

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig


def iter_layers(run: RunConfig, device: torch.device) -> Iterator[nn.Module]:
    """Yields the model layer by layer, each with the weights that any layout gives it."""
    for part in run.model.split_stages(run.model.layers, run.data.sequence):
        piece = run.model.build_meta(part)
        run.adapter.apply(piece, run.model)
        piece.to_empty(device=device)
        run.model.init_weights(piece, run.seed)
        run.adapter.init_or_load_weights(piece, run.model, run.seed)
        yield piece


def build_zero3_sharded(run: RunConfig, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Returns the model with this rank's shards of every parameter."""
    from deepspeed import zero
    from deepspeed.utils import groups

    part, swapper = StageSlice(range(run.model.layers)), None
    whole = run.model.build_meta(part)
    run.adapter.apply(whole, run.model)
    for piece in iter_layers(run, device):
        if run.precision.compute is FloatFormat.bf16:
            for parameter in piece.parameters():
                parameter.data = parameter.data.bfloat16()
        known = {**dict(piece.named_parameters()), **dict(piece.named_buffers())}
        swapper = zero.Init(
            module=piece,
            config_dict_or_path=config,
            zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
            param_swapper=swapper,
        ).param_swapper
        for name, tensor in known.items():
            holder, _, key = name.rpartition(".")
            setattr(whole.get_submodule(holder), key, tensor)
    for layer in whole.modules():
        if hasattr(layer, "base_layer"):  # an adapter's, which reads weights of layers in it
            for parameter in layer.parameters():
                zero.register_external_parameter(layer, parameter)
    run.objective.apply(whole, in_forward=run.objective.takes_gradients_in_forward(run))
    run.memory.apply(whole, part)
    return whole
