"""PEFT's layers inside a model that is still on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import TYPE_CHECKING, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule

if TYPE_CHECKING:
    from scalewise.adapters.lora_config import LoRAAdapterConfig

DEFAULT = "default"
"""PEFT's name of an adapter that was given none."""


def inject_lora(module: ModelModule, names: Sequence[str], adapter: LoRAAdapterConfig) -> None:
    """Puts PEFT's layers in the place of the targets; all else is frozen from here on."""
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # any number will do
        use_rslora=adapter.rank_stabilized,
        lora_dropout=adapter.dropout,
        target_modules=full_names(module, names),
        init_lora_weights=False,
        use_dora=adapter.magnitudes,
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, module)


def full_names(module: ModelModule, names: Sequence[str]) -> list[str]:
    """Returns the names that layers of a block, by name within it, have in all of them."""
    return [
        f"{name}.{target}"
        for name, block in module.named_modules()
        if any(block is layer for layer in module.layers())
        for target in names
    ]


@contextmanager
def without_lora(module: ModelModule) -> Iterator[None]:
    """Leaves the products out. PEFT's own switch would change what is trained as well."""
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


@torch.no_grad()
def init_lora(module: ModelModule, seed: int) -> None:
    """Draws A from a normal distribution of PEFT's variance, 1 / (3 inputs); B is zero."""
    for name, parameter in module.named_parameters():
        if ".lora_A." in name:
            init.init_normal(name, parameter, seed, 1 / sqrt(3 * parameter.shape[1]))
        elif ".lora_B." in name:
            nn.init.zeros_(parameter)


@torch.no_grad()
def init_pissa(module: ModelModule) -> None:
    """Puts ``rank`` singular values of each adapted matrix W, the largest, into A and B.

    With ``U S V`` of them, A is ``sqrt(S / scale) V``, B is ``U sqrt(S / scale)``, and W the rest.
    """
    for layer in module.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = cast(Tensor, layer.get_base_layer().weight)
        scale, rank = layer.scaling[DEFAULT], layer.r[DEFAULT]
        whole = init.full_tensor(base).float()
        down, up = _principal_factors(whole, rank, scale)
        init.copy_into(cast(Tensor, layer.lora_A[DEFAULT].weight), down)
        init.copy_into(cast(Tensor, layer.lora_B[DEFAULT].weight), up)
        init.copy_into(base, whole - scale * up @ down)


def _principal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns A and B whose product, times ``scale``, is nearest to a matrix."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[:rank] / scale).sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def pissa_as_lora(
    state: Mapping[str, Tensor], base_state: Mapping[str, Tensor], adapter: LoRAAdapterConfig
) -> dict[str, Tensor]:
    """Returns what ``move_principal`` has taken out of matrices as products beside whole ones.

    ``base_state``: the model's own weights. To each A and B comes what takes out again what these
    began with: rows and columns of twice the rank, of the same scale.
    """
    found = dict(state)
    for name in (name for name in base_state if adapter_weight_name(name, "A") in state):
        whole, rest = base_state[name], state[name]
        down, up = _principal_factors(whole.float() - rest.float(), adapter.rank, adapter.scale)
        for part, held, dim in (("A", down, 0), ("B", -up, 1)):
            kept = state[adapter_weight_name(name, part)]
            found[adapter_weight_name(name, part)] = torch.cat([kept, held.to(kept.dtype)], dim)
        found[name] = whole.to(rest.dtype)
    return found


def adapter_weight_name(name: str, part: str) -> str:
    """Returns the name of the A or B beside a layer, of which ``name`` is the matrix."""
    return f"{name.removesuffix('.weight')}.lora_{part}.{DEFAULT}.weight"


def merge_lora(
    state: Mapping[str, Tensor], adapter: LoRAAdapterConfig, model: ModelConfig
) -> dict[str, Tensor]:
    """Returns the model's own weights with each product of B and A added to its matrix.

    Rows that have magnitudes are made as long. It is computed in fp32 and rounded once, to the
    matrix's format.
    """
    whole = {weight.name: state[weight.name] for weight in model.weight_census()}
    for name, held in whole.items():
        if adapter_weight_name(name, "A") not in state:
            continue
        down, up = (state[adapter_weight_name(name, part)].float() for part in "AB")
        sum_OI = held.float() + adapter.scale * up @ down
        if adapter.magnitudes:
            module = name.removesuffix(".weight")
            magnitudes_O = state[f"{module}.lora_magnitude_vector.{DEFAULT}.weight"].float()
            sum_OI *= (magnitudes_O / torch.linalg.vector_norm(sum_OI, dim=1))[:, None]
        whole[name] = sum_OI.to(held.dtype)
    return whole
