"""Linear layers with fake quantization: operands are rounded to integers and back.

Results are torchao's bitwise. Saved tensors are not: only the weight and the input are saved, as by
a plain linear layer, so that FSDP and activation checkpointing save the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import MappingType
from torchao.quantization.quant_primitives import choose_qparams_affine

from scalewise.models.autocast import compute_dtype
from scalewise.models.base import ModelConfig
from scalewise.models.base_module import ModelModule
from scalewise.quantization.build import replace_linears
from scalewise.quantization.config import QATInt4Config


@dataclass(frozen=True)
class IntegerRange:
    """Integers from ``low`` to ``high`` and the mapping of real values to them."""

    low: int
    high: int
    mapping: MappingType

    def compute_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point over the last dimension, in fp32."""
        ends = torch.stack([x.amin(-1), x.amax(-1)], -1).float()
        scale, zero = choose_qparams_affine(
            ends,
            self.mapping,
            (*(1 for _ in x.shape[:-1]), 2),
            torch.int8,
            self.low,
            self.high,
            zero_point_dtype=torch.float32,
            keepdim=True,
        )
        return scale, zero

    def fake_quantize(self, x: Tensor, group_size: int) -> Tensor:
        """``x`` rounded to integers and back, with a scale per ``group_size`` elements of a row."""
        x_G = x.reshape(*x.shape[:-1], -1, group_size)
        scale, zero = self.compute_scale(x_G)
        inverse = 1.0 / scale
        rounded = x_G.mul(inverse).round_().add_(zero).clamp_(self.low, self.high)
        return rounded.sub_(zero).mul_(scale).flatten(-2).to(x.dtype)

    def backward(self, gradient: Tensor, x: Tensor, group_size: int) -> Tensor:
        """Straight-through gradient of ``x``: 0 where values were clipped."""
        x_G = x.reshape(*x.shape[:-1], -1, group_size)
        scale, zero = self.compute_scale(x_G)
        inverse = 1.0 / scale
        level = x_G.mul(inverse).round_().add_(zero)
        outside = (level < self.low).logical_or_(level > self.high)
        del level
        x_gradient = gradient.reshape(x_G.shape).mul(scale).masked_fill_(outside, 0)
        return x_gradient.mul_(inverse).flatten(-2).to(x.dtype)


WEIGHTS = IntegerRange(-8, 7, MappingType.SYMMETRIC)
INPUTS = IntegerRange(-128, 127, MappingType.ASYMMETRIC)


class FakeQuantizedLinear(nn.Linear):
    """``x W^T`` with W rounded to 4 bits; created on the meta device.

    ``rounds_inputs``: x is rounded to 8 bits as well.
    """

    def __init__(
        self, in_features: int, out_features: int, group: int, *, rounds_inputs: bool
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.group, self.rounds_inputs = group, rounds_inputs

    def forward(self, x: Tensor) -> Tensor:
        """Matmul in the autocast data type."""
        dtype = compute_dtype(x)
        output = _FakeQuantizedMatmul.apply(x, self.weight, self.group, self.rounds_inputs, dtype)  # type: ignore[no-untyped-call]  # torch's
        return cast(Tensor, output)


class _FakeQuantizedMatmul(torch.autograd.Function):
    """Autograd function that rounds again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: int, rounds_inputs: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.rounds_inputs, ctx.dtype = group, rounds_inputs, dtype
        operand = (INPUTS.fake_quantize(x, x.shape[-1]) if rounds_inputs else x).to(dtype)
        return F.linear(operand, WEIGHTS.fake_quantize(weight, group).to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        x_gradient = gradient @ WEIGHTS.fake_quantize(weight, ctx.group).to(ctx.dtype)
        x_gradient = (
            INPUTS.backward(x_gradient, x, x.shape[-1])
            if ctx.rounds_inputs
            else x_gradient.to(x.dtype)
        )
        operand = (INPUTS.fake_quantize(x, x.shape[-1]) if ctx.rounds_inputs else x).to(ctx.dtype)
        weight_gradient = gradient.flatten(0, -2).T @ operand.flatten(0, -2)
        del operand
        return x_gradient, WEIGHTS.backward(weight_gradient, weight, ctx.group), None, None, None


@replace_linears.register(QATInt4Config)
def _fake_quantize_linears(config: QATInt4Config, module: ModelModule, model: ModelConfig) -> None:
    def build(layer: nn.Linear) -> nn.Module:
        out_features, in_features = layer.weight.shape
        return FakeQuantizedLinear(
            in_features, out_features, config.group, rounds_inputs=config.rounds_inputs
        )

    module.replace_linears(config.fake_quantized_layers(model), build)
