"""PEFT's LoRA layers in a model on the meta device."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import sqrt
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from scalewise.adapters.build import apply_adapter, disable_adapter, init_adapter, merge_adapter
from scalewise.adapters.lora_config import LoRAAdapterConfig, PiSSAAdapterConfig
from scalewise.adapters.target_modules import module_name
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule

DEFAULT = "default"
"""PEFT's default adapter name."""


@apply_adapter.register(LoRAAdapterConfig)
def apply_lora(adapter: LoRAAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace target layers by PEFT's layers and freeze all other parameters, in place."""
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # annotated as int, but floats work
        use_rslora=adapter.rank_stabilized,
        lora_dropout=adapter.dropout,
        target_modules=full_names(module, adapter.adapted_layers(model)),
        init_lora_weights=False,
        use_dora=adapter.magnitudes,
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, module)
    unfreeze_modules(module, adapter.fully_trained_modules(model))


def unfreeze_modules(module: ModelModule, names: Container[str]) -> None:
    """Train the model's own parameters of some modules."""
    for name, parameter in module.named_parameters():
        if module_name(name) in names:
            parameter.requires_grad_(True)


def full_names(module: ModelModule, names: Sequence[str]) -> list[str]:
    """Names within the model of layers of all blocks, from names within a block."""
    return [
        f"{name}.{target}"
        for name, block in module.named_modules()
        if any(block is layer for layer in module.layers())
        for target in names
    ]


@disable_adapter.register(LoRAAdapterConfig)
@contextmanager
def without_lora(adapter: LoRAAdapterConfig, module: ModelModule) -> Iterator[None]:
    """Context in which the products B A are left out.

    PEFT's own switch would also change which parameters are trained.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


@init_adapter.register(LoRAAdapterConfig)
@torch.no_grad()
def init_lora(adapter: LoRAAdapterConfig, module: ModelModule, seed: int) -> None:
    """Draw A from a normal distribution with PEFT's variance, 1 / (3 inputs); B is zero."""
    for name, parameter in module.named_parameters():
        if ".lora_A." in name:
            init.init_normal(name, parameter, seed, 1 / sqrt(3 * parameter.shape[1]))
        elif ".lora_B." in name:
            nn.init.zeros_(parameter)


@init_adapter.register(PiSSAAdapterConfig)
@torch.no_grad()
def init_pissa(adapter: PiSSAAdapterConfig, module: ModelModule, seed: int) -> None:
    """Move the largest ``rank`` singular values of each adapted matrix W to A and B.

    With their singular vectors ``U S V``, A is ``sqrt(S / scale) V``, B is ``U sqrt(S / scale)``,
    and W is the remainder.
    """
    for layer in module.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = cast(Tensor, layer.get_base_layer().weight)
        scale, rank = layer.scaling[DEFAULT], layer.r[DEFAULT]
        full_weight = init.full_tensor(base).float()
        down, up = _principal_factors(full_weight, rank, scale)
        init.copy_into(cast(Tensor, layer.lora_A[DEFAULT].weight), down)
        init.copy_into(cast(Tensor, layer.lora_B[DEFAULT].weight), up)
        init.copy_into(base, full_weight - scale * up @ down)


def _principal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A and B whose product, times ``scale``, is the best approximation of a matrix."""
    left_vectors, singular_values, right_vectors = torch.linalg.svd(weight, full_matrices=False)
    roots = (singular_values[:rank] / scale).sqrt()
    return roots[:, None] * right_vectors[:rank], left_vectors[:, :rank] * roots


def pissa_to_lora(
    adapter: PiSSAAdapterConfig, state: Mapping[str, Tensor], base_state: Mapping[str, Tensor]
) -> tuple[LoRAAdapterConfig, dict[str, Tensor]]:
    """Config and state dict of a LoRA of twice the rank, equivalent to PiSSA on ``base_state``.

    ``base_state``: weights of the model before ``init_pissa``. To each A and B, the initial values
    are appended, with B negated, so that they cancel the components that ``init_pissa`` has moved.
    """
    weights = dict(state)
    for name in (name for name in base_state if adapter_weight_name(name, "A") in state):
        base_weight, remainder = base_state[name], state[name]
        down, up = _principal_factors(
            base_weight.float() - remainder.float(), adapter.rank, adapter.scale
        )
        for part, initial, dim in (("A", down, 0), ("B", -up, 1)):
            current = state[adapter_weight_name(name, part)]
            weights[adapter_weight_name(name, part)] = torch.cat(
                [current, initial.to(current.dtype)], dim
            )
        weights[name] = base_weight.to(remainder.dtype)
    options = {entry.name: getattr(adapter, entry.name) for entry in fields(adapter)}
    doubled = options | {"rank": 2 * adapter.rank, "alpha": 2 * adapter.alpha}
    return LoRAAdapterConfig(**doubled), weights


def adapter_weight_name(name: str, part: str) -> str:
    """Name of the A or B (``part``) of a layer; ``name``: name of its matrix."""
    return f"{name.removesuffix('.weight')}.lora_{part}.{DEFAULT}.weight"


@merge_adapter.register(LoRAAdapterConfig)
def merge_lora(
    adapter: LoRAAdapterConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Weights of the model with each product B A added to its matrix.

    With magnitudes, rows are scaled to them. Sums are computed in fp32 and rounded once to the data
    type of the matrix.
    """
    merged = {weight.name: state[weight.name] for weight in model.weight_census()}
    for name, base_weight in merged.items():
        if adapter_weight_name(name, "A") not in state:
            continue
        down, up = (state[adapter_weight_name(name, part)].float() for part in "AB")
        sum_OI = base_weight.float() + adapter.scale * up @ down
        if adapter.magnitudes:
            module = name.removesuffix(".weight")
            magnitudes_O = state[f"{module}.lora_magnitude_vector.{DEFAULT}.weight"].float()
            sum_OI *= (magnitudes_O / torch.linalg.vector_norm(sum_OI, dim=1))[:, None]
        merged[name] = sum_OI.to(base_weight.dtype)
    return merged
