"""Linear layers that round what they multiply to integers and back (fake quantization).

The arithmetic is torchao's, number by number; what it keeps for backward is not: the weight and
the input alone, as a plain layer, so that shards and recomputation save what they save of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import MappingType
from torchao.quantization.quant_primitives import choose_qparams_affine


@dataclass(frozen=True)
class IntegerRange:
    """The integers from ``low`` to ``high``, and which of them stands for what."""

    low: int
    high: int
    mapping: MappingType

    def compute_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scale and zero point of each row of the last dim, in fp32."""
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
        """Returns ``x`` as integers would have it, with a scale for each ``group_size`` of a
        row."""
        x_G = x.reshape(*x.shape[:-1], -1, group_size)
        scale, zero = self.compute_scale(x_G)
        inverse = 1.0 / scale
        found = x_G.mul(inverse).round_().add_(zero).clamp_(self.low, self.high)
        return found.sub_(zero).mul_(scale).flatten(-2).to(x.dtype)

    def backward(self, gradient: Tensor, x: Tensor, group_size: int) -> Tensor:
        """Returns the gradient of ``x`` for that of what it is rounded to: 0 where cut off."""
        x_G = x.reshape(*x.shape[:-1], -1, group_size)
        scale, zero = self.compute_scale(x_G)
        inverse = 1.0 / scale
        level = x_G.mul(inverse).round_().add_(zero)
        outside = (level < self.low).logical_or_(level > self.high)
        del level
        found = gradient.reshape(x_G.shape).mul(scale).masked_fill_(outside, 0)
        return found.mul_(inverse).flatten(-2).to(x.dtype)


WEIGHTS = IntegerRange(-8, 7, MappingType.SYMMETRIC)
INPUTS = IntegerRange(-128, 127, MappingType.ASYMMETRIC)


class FakeQuantizedLinear(nn.Linear):
    """``x W^T`` of W rounded to 4 bits and, with ``rounds_inputs``, of x to 8; made on the meta
    device."""

    def __init__(
        self, in_features: int, out_features: int, group: int, *, rounds_inputs: bool
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.group, self.rounds_inputs = group, rounds_inputs

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product in the format of products."""
        of = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            of = torch.get_autocast_dtype(x.device.type)
        made = _FakeQuantizedMatmul.apply(x, self.weight, self.group, self.rounds_inputs, of)  # type: ignore[no-untyped-call]  # torch's
        return cast(Tensor, made)


class _FakeQuantizedMatmul(torch.autograd.Function):
    """Rounds once more in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: int, rounds_inputs: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.inputs, ctx.of = group, rounds_inputs, dtype
        read = (INPUTS.fake_quantize(x, x.shape[-1]) if rounds_inputs else x).to(dtype)
        return F.linear(read, WEIGHTS.fake_quantize(weight, group).to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = gradient @ WEIGHTS.fake_quantize(weight, ctx.group).to(ctx.of)
        of_x = INPUTS.backward(of_x, x, x.shape[-1]) if ctx.inputs else of_x.to(x.dtype)
        read = (INPUTS.fake_quantize(x, x.shape[-1]) if ctx.inputs else x).to(ctx.of)
        of_weight = gradient.flatten(0, -2).T @ read.flatten(0, -2)
        del read
        return of_x, WEIGHTS.backward(of_weight, weight, ctx.group), None, None, None
