"""DoRA in PEFT's layers, with row norms computed without the product of B and A."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scalewise.adapters.build import apply_adapter, init_adapter
from scalewise.adapters.lora_config import DoRAAdapterConfig
from scalewise.adapters.lora_modules import DEFAULT, apply_lora, init_lora
from scalewise.models import init
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.models.init import local_tensor


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
