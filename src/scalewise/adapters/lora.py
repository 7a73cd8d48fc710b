"""PEFT's layers inside a model that is still on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from scalewise.models import initial
from scalewise.models.module import ModelModule

if TYPE_CHECKING:
    from scalewise.adapters.spec import Lora


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
