"""PEFT's layers inside a model that is still on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from scalewise.models import initial
from scalewise.models.base import Model
from scalewise.models.module import ModelModule

if TYPE_CHECKING:
    from scalewise.adapters.low_rank import Lora

DEFAULT = "default"
"""PEFT's name of an adapter that was given none."""


def inject(module: ModelModule, names: Sequence[str], spec: Lora) -> None:
    """Puts PEFT's layers in the place of the targets; all else is frozen from here on."""
    targets = [
        f"{name}.{target}"
        for name, block in module.named_modules()
        if any(block is layer for layer in module.layers())
        for target in names
    ]
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),  # any number will do
        use_rslora=spec.rank_stabilized,
        lora_dropout=spec.dropout,
        target_modules=targets,
        init_lora_weights=False,
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, module)


@torch.no_grad()
def draw(module: ModelModule, seed: int) -> None:
    """Draws A from a normal distribution of PEFT's variance, 1 / (3 inputs); B is zero."""
    for name, parameter in module.named_parameters():
        if ".lora_A." in name:
            initial.draw(name, parameter, seed, 1 / sqrt(3 * parameter.shape[1]))
        elif ".lora_B." in name:
            nn.init.zeros_(parameter)


@torch.no_grad()
def move_principal(module: ModelModule) -> None:
    """Puts ``rank`` singular values of each adapted matrix W, the largest, into A and B.

    With ``U S V`` of them, A is ``sqrt(S / scale) V``, B is ``U sqrt(S / scale)``, and W the rest.
    """
    for layer in module.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = cast(Tensor, layer.get_base_layer().weight)
        scale, rank = layer.scaling[DEFAULT], layer.r[DEFAULT]
        whole = initial.whole(base).float()
        left, values, right = torch.linalg.svd(whole, full_matrices=False)
        roots = (values[:rank] / scale).sqrt()
        down, up = roots[:, None] * right[:rank], left[:, :rank] * roots
        initial.put(cast(Tensor, layer.lora_A[DEFAULT].weight), down)
        initial.put(cast(Tensor, layer.lora_B[DEFAULT].weight), up)
        initial.put(base, whole - scale * up @ down)


def merged(state: Mapping[str, Tensor], spec: Lora, model: Model) -> dict[str, Tensor]:
    """Returns the model's own weights with each product of B and A added to its matrix.

    It is computed in fp32 and rounded once, to the matrix's format.
    """
    whole = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    for weight in model.census():
        if spec.is_target(weight, model) and weight.name.endswith(".weight"):
            module = weight.name.removesuffix(".weight")
            down, up = (state[f"{module}.lora_{part}.{DEFAULT}.weight"].float() for part in "AB")
            held = whole[weight.name]
            whole[weight.name] = (held.float() + spec.scale * up @ down).to(held.dtype)
    return whole
