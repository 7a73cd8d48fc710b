"""DoRA in PEFT's layers: rows are measured without ever making the product of B and A."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scalewise.adapters.lora_modules import DEFAULT
from scalewise.models import init
from scalewise.models.base_module import ModelModule


class MagnitudeScale(nn.Module):
    """``v_BTO, norm_O -> weight_O / norm_O * v_BTO``, the weights being PEFT's magnitudes."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, v_BTO: Tensor, *, norm_O: Tensor) -> Tensor:
        """Returns ``v`` with each feature scaled, in ``v``'s dtype."""
        scale_O: Tensor = self.weight / norm_O
        return scale_O.to(v_BTO.dtype) * v_BTO


class DoraLinear(DoraLinearVariant):
    """PEFT's DoRA, which multiplies B and A with an identity to measure what they make.

    Dropout, too, is at A's inputs alone, as in LoRA: PEFT computes all of a layer once more.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Returns the layer's output, given that of the frozen one."""
        base, scaling = module.get_base_layer(), module.scaling[active_adapter]
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        bias = None if base.bias is None else _local_tensor(base.bias)
        added = up(down(module.lora_dropout[active_adapter](x))) * scaling
        norm_O = adapted_row_norms(base.weight, down.weight, up.weight, scaling)
        magnitudes = module.lora_magnitude_vector[active_adapter]
        if bias is None:
            return cast(Tensor, magnitudes(result + added, norm_O=norm_O))
        return cast(Tensor, magnitudes(result - bias + added, norm_O=norm_O) + bias)


@torch.no_grad()
def adapted_row_norms(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Returns the norms of the rows of ``W + scale B A``, in fp32.

    ``|w|^2 + scale b (2 A w + scale A A^T b)`` for a row w of W and b of B; where tensor
    parallelism cuts W by its columns, the squares are sums over its ranks.
    """
    w_OI, a_RI, b_OR = _local_tensor(weight), _local_tensor(down), _local_tensor(up)
    with torch.autocast(w_OI.device.type, enabled=False):
        inner_OR = 2 * (w_OI @ a_RI.T).float() + scale * (b_OR @ (a_RI @ a_RI.T)).float()
    squares_O = torch.linalg.vector_norm(w_OI, dim=1, dtype=torch.float32).square()
    squares_O += scale * (b_OR * inner_OR).sum(1)
    if isinstance(weight, DTensor):
        by_rows = weight.placements[-1] == Shard(0)
        given, wanted = (Shard(0), Shard(0)) if by_rows else (Partial(), Replicate())
        held = DTensor.from_local(squares_O, weight.device_mesh, [given], run_check=False)
        squares_O = held.redistribute(placements=[wanted])
    return cast(Tensor, squares_O.sqrt())


def patch_dora_layers(module: ModelModule) -> None:
    """Has PEFT's DoRA layers compute as here, in place."""
    for layer in _dora_layers(module):
        held = cast(nn.Parameter, layer.lora_magnitude_vector[DEFAULT].weight)
        layer.lora_magnitude_vector[DEFAULT] = MagnitudeScale(held)
        layer.lora_variant[DEFAULT] = DoraLinear()


@torch.no_grad()
def init_magnitudes(module: ModelModule) -> None:
    """Makes each magnitude the norm of its row of W."""
    for layer in _dora_layers(module):
        whole = init.full_tensor(cast(Tensor, layer.get_base_layer().weight)).float()
        magnitudes = cast(Tensor, layer.lora_magnitude_vector[DEFAULT].weight)
        init.copy_into(magnitudes, torch.linalg.vector_norm(whole, dim=1))


def _dora_layers(module: ModelModule) -> Iterator[Linear]:
    return (part for part in module.modules() if isinstance(part, Linear))


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
