"""Linear layers whose frozen matrix lies packed, and is unpacked each time that it is used.

All that is packed lies in integers of 8 bits, fp32 scales by their bytes, so that no change of a
module's format touches it, and FSDP shards and gathers it as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any, cast

import torch
from bitsandbytes import functional as packing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from scalewise.models import init
from scalewise.quantization.bitsandbytes_config import BLOCK, FP32, SCALES

LARGEST = 127
"""What a row's largest number becomes in 8 bits."""


class PackedLinear(nn.Linear, init.PackedMatrix):
    """``x W^T + bias`` with W frozen and packed; made on the meta device."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")

    def register_frozen(self, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
        """Makes a frozen tensor, on the meta device."""
        empty = torch.empty(shape, dtype=dtype, device="meta")
        setattr(self, name, nn.Parameter(empty, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        """Returns that of the matrix."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def storage_tensor(self) -> Tensor:
        """Returns a tensor that lies where the matrix does."""
        return self.weight

    @abstractmethod
    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix."""

    def matmul(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + bias``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.unpack(x.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + bias`` in the format of products."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return cast(Tensor, _PackedMatmul.apply(x, self))  # type: ignore[no-untyped-call]  # torch's


class _PackedMatmul(torch.autograd.Function):
    """Keeps nothing for backward: the matrix is unpacked once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return layer.matmul(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.unpack(gradient.dtype), None


class FourBitLinear(PackedLinear):
    """Two numbers to a byte, in blocks of their own scale."""

    scale: Tensor
    scale_of_scales: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, code: str, packs_scales: bool
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.code, self.packs_scales = code, packs_scales
        scales = -(-out_features * in_features // BLOCK)
        self.register_frozen("weight", -(-out_features * in_features // 2))
        self.register_frozen("scale", *((scales,) if packs_scales else (scales, FP32)))
        if packs_scales:
            self.register_frozen("scale_of_scales", -(-scales // SCALES) + 1, FP32)

    def pack(self, matrix: Tensor) -> None:
        """Packs a matrix; of sharded tensors each rank takes its own."""
        codes, state = packing.quantize_4bit(
            matrix, blocksize=BLOCK, quant_type=self.code, compress_statistics=self.packs_scales
        )
        init.copy_into(self.weight, codes.flatten())
        if not self.packs_scales:
            init.copy_into(self.scale, _float_bytes(state.absmax))
            return
        init.copy_into(self.scale, state.absmax)
        mean = state.offset.reshape(1)
        init.copy_into(self.scale_of_scales, _float_bytes(torch.cat([state.state2.absmax, mean])))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix."""
        scales = self.scale
        if self.packs_scales:
            *_, mean = of_scales = self.scale_of_scales.view(torch.float32).flatten()
            table = _dynamic_code(scales.device)
            scales = packing.dequantize_blockwise(
                scales, absmax=of_scales[:-1], code=table, blocksize=SCALES
            )
            scales = scales + mean
        else:
            scales = scales.view(torch.float32).flatten()
        kind = {"blocksize": BLOCK, "quant_type": self.code, "dtype": dtype}
        state = packing.QuantState(scales, self.shape, **kind)
        return packing.dequantize_4bit(self.weight.view(-1, 1), state)


class Int8Linear(PackedLinear):
    """A byte for each number, scaled row by row."""

    scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, threshold: float
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.threshold = threshold
        self.register_frozen("weight", out_features, in_features, dtype=torch.int8)
        self.register_frozen("scale", out_features, FP32)

    def pack(self, matrix: Tensor) -> None:
        """Packs a matrix; of sharded tensors each rank takes its own."""
        numbers, scale, _ = packing.int8_vectorwise_quant(matrix.half())
        init.copy_into(self.weight, numbers)
        init.copy_into(self.scale, _float_bytes(scale))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix."""
        scale = self.scale.view(torch.float32) / LARGEST
        return self.weight.to(dtype).mul_(scale)

    def matmul(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + bias``: on CUDA of inputs in 8 bits too, but for outliers."""
        return self.int8_matmul(x) if x.is_cuda else super().matmul(x)

    def int8_matmul(self, x: Tensor) -> Tensor:
        """Returns it as LLM.int8 has it: products of integers, outliers in 16 bits."""
        flat = x.reshape(-1, self.in_features)
        numbers, scales, outliers = packing.int8_vectorwise_quant(flat.half(), self.threshold)
        product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            flat,
            numbers,
            self.weight,
            scales,
            self.scale.view(torch.float32).flatten(),
            outliers,
            self.bias,
        )
        return cast(Tensor, product).view(*x.shape[:-1], self.out_features)


def _float_bytes(values: Tensor) -> Tensor:
    """Returns fp32 numbers by their bytes, four in a row."""
    return values.float().contiguous().view(-1, 1).view(torch.uint8)


@cache
def _dynamic_code(device: torch.device) -> Tensor:
    """Returns the 256 values that packed scales may have."""
    with unset_fake_temporarily():  # a plan's would have no numbers, and be kept for runs
        table: Tensor = packing.create_dynamic_map()
        return table.to(device)
