"""PEFT's LoRA layers in a model, and DoRA with row norms that need no product of B and A."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import sqrt
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scalewise.adapters.build import apply_adapter, disable_adapter, init_adapter, merge_adapter
from scalewise.adapters.expert_lora import ExpertLoRA, adapt_experts
from scalewise.adapters.lora_config import DoRAAdapterConfig, LoRAAdapterConfig, PiSSAAdapterConfig
from scalewise.adapters.target_modules import DEFAULT, module_name
from scalewise.compat.hugging_face import disable_lora
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.models.init import local_tensor


@apply_adapter.register(LoRAAdapterConfig)
def apply_lora(adapter: LoRAAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace target layers by PEFT's layers and freeze all other parameters, in place."""
    layers = adapter.adapted_layers(model)
    experts = [name for name in layers if name in model.expert_layers]
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # annotated as int, but floats work
        use_rslora=adapter.rank_stabilized,
        lora_dropout=adapter.dropout,
        target_modules=full_names(module, [name for name in layers if name not in experts]),
        init_lora_weights=False,
        use_dora=adapter.magnitudes,
    )
    module.requires_grad_(False)
    with torch.device("meta"):
        if config.target_modules:  # PEFT rejects an empty list
            inject_adapter_in_model(config, module)
        adapt_experts(module, experts, adapter.rank, adapter.scale)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            # Matmuls cast their inputs; PEFT would first cast bf16 features to fp32.
            layer.cast_input_dtype_enabled = False
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
    experts = [part for part in module.modules() if isinstance(part, ExpertLoRA)]
    for is_disabled in (True, False):
        for layer in layers:
            disable_lora(layer, is_disabled)
        for expert in experts:
            expert.is_disabled = is_disabled
        if is_disabled:
            yield


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
        experts = len(down) // adapter.rank  # stacked; 1 for a linear layer
        update_EOI = up.unflatten(0, (experts, -1)) @ down.unflatten(0, (experts, -1))
        sum_OI = base_weight.float() + adapter.scale * update_EOI.flatten(0, 1)
        if adapter.magnitudes:
            module = name.removesuffix(".weight")
            magnitudes_O = state[f"{module}.lora_magnitude_vector.{DEFAULT}.weight"].float()
            sum_OI *= (magnitudes_O / torch.linalg.vector_norm(sum_OI, dim=1))[:, None]
        merged[name] = sum_OI.to(base_weight.dtype)
    return merged


class MagnitudeScale(nn.Module):
    """``v_BTO, norm_O -> weight_O / norm_O * v_BTO``.

    ``weight_O`` is PEFT's magnitude vector.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, v_BTO: Tensor, *, norm_O: Tensor) -> Tensor:
        """``v_BTO`` with each feature scaled, in its data type."""
        scale_O: Tensor = self.weight / norm_O
        return scale_O.to(v_BTO.dtype) * v_BTO


class DoraLinear(DoraLinearVariant):
    """PEFT's DoRA without its product of B and A with an identity matrix.

    Dropout applies to the input of A only, as in LoRA; PEFT recomputes the frozen layer for it.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Output of the layer; ``result`` is that of the frozen layer."""
        base, scaling = module.get_base_layer(), module.scaling[active_adapter]
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        bias = None if base.bias is None else local_tensor(base.bias)
        added = up(down(module.lora_dropout[active_adapter](x))) * scaling
        norm_O = adapted_row_norms(base.weight, down.weight, up.weight, scaling)
        magnitudes = module.lora_magnitude_vector[active_adapter]
        if bias is None:
            return cast(Tensor, magnitudes(result + added, norm_O=norm_O))
        return cast(Tensor, magnitudes(result - bias + added, norm_O=norm_O) + bias)


@torch.no_grad()
def adapted_row_norms(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Row norms of ``W + scale B A``, in fp32.

    The squared norm is ``|w|^2 + scale b (2 A w + scale A A^T b)`` for a row w of W and b of B. If
    tensor parallelism shards W by columns, squares are summed over its ranks.
    """
    w_OI, a_RI, b_OR = local_tensor(weight), local_tensor(down), local_tensor(up)
    with torch.autocast(w_OI.device.type, enabled=False):
        inner_OR = 2 * (w_OI @ a_RI.T).float() + scale * (b_OR @ (a_RI @ a_RI.T)).float()
    squares_O = torch.linalg.vector_norm(w_OI, dim=1, dtype=torch.float32).square()
    squares_O += scale * (b_OR * inner_OR).sum(1)
    if isinstance(weight, DTensor):
        by_rows = weight.placements[-1] == Shard(0)
        placement, norm_placement = (Shard(0), Shard(0)) if by_rows else (Partial(), Replicate())
        distributed_O = DTensor.from_local(
            squares_O, weight.device_mesh, [placement], run_check=False
        )
        squares_O = distributed_O.redistribute(placements=[norm_placement])
    return cast(Tensor, squares_O.sqrt())


@apply_adapter.register(DoRAAdapterConfig)
def apply_dora(adapter: DoRAAdapterConfig, module: ModelModule, model: ModelConfig) -> None:
    """Replace target layers by PEFT's layers with the DoRA computation of this module, in place."""
    apply_lora(adapter, module, model)
    for layer in _dora_layers(module):
        magnitudes = cast(nn.Parameter, layer.lora_magnitude_vector[DEFAULT].weight)
        layer.lora_magnitude_vector[DEFAULT] = MagnitudeScale(magnitudes)
        layer.lora_variant[DEFAULT] = DoraLinear()


@init_adapter.register(DoRAAdapterConfig)
@torch.no_grad()
def init_dora(adapter: DoRAAdapterConfig, module: ModelModule, seed: int) -> None:
    """Draw A, and set each magnitude to the norm of its row of W; B is zero."""
    init_lora(adapter, module, seed)
    for layer in _dora_layers(module):
        full_weight = init.full_tensor(cast(Tensor, layer.get_base_layer().weight)).float()
        magnitudes = cast(Tensor, layer.lora_magnitude_vector[DEFAULT].weight)
        init.copy_into(magnitudes, torch.linalg.vector_norm(full_weight, dim=1))


def _dora_layers(module: ModelModule) -> Iterator[Linear]:
    return (part for part in module.modules() if isinstance(part, Linear))
