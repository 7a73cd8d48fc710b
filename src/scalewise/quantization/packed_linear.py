"""Linear layers with a packed frozen matrix, which is dequantized for every matmul.

Packed tensors have 8-bit integer types, fp32 scales as bytes, so that a change of a module's data
type does not convert them and FSDP shards and gathers them unchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache, partial, singledispatch
from typing import Any, cast

import torch
from bitsandbytes import functional as packing
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.compat.torch import unset_fake_temporarily
from scalewise.lazy_dispatch import not_registered
from scalewise.models import init
from scalewise.models.autocast import compute_dtype
from scalewise.models.base import ModelConfig, Weight
from scalewise.models.base_module import ModelModule
from scalewise.quantization.build import replace_linears, round_state_dict, unpack_state_dict
from scalewise.quantization.config import (
    BLOCK_ELEMENTS,
    FP32_BYTES,
    SCALES_PER_BLOCK,
    BitsAndBytesConfig,
    FourBitConfig,
    Int8Config,
)

INT8_MAX = 127
"""Code of the largest magnitude of a row."""


class PackedLinear(nn.Linear, init.PackedMatrix):
    """``x W^T + bias`` with W frozen and packed; created on the meta device."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")

    def register_frozen(self, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
        """Register a frozen parameter on the meta device."""
        empty = torch.empty(shape, dtype=dtype, device="meta")
        setattr(self, name, nn.Parameter(empty, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def storage_tensor(self) -> Tensor:
        """Tensor on the device of the matrix."""
        return self.weight

    @abstractmethod
    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Dequantized matrix."""

    def matmul(self, x: Tensor) -> Tensor:
        """``x W^T + bias``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.unpack(x.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x W^T + bias`` in the autocast data type."""
        x = x.to(compute_dtype(x))
        return cast(Tensor, _PackedMatmul.apply(x, self))  # type: ignore[no-untyped-call]  # torch's


class _PackedMatmul(torch.autograd.Function):
    """Autograd function that saves no tensor and dequantizes again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return layer.matmul(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.unpack(gradient.dtype), None


class FourBitLinear(PackedLinear):
    """Two 4-bit codes per byte, with one scale per block."""

    scale: Tensor
    scale_of_scales: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, code: str, packs_scales: bool
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.code, self.packs_scales = code, packs_scales
        num_scales = -(-out_features * in_features // BLOCK_ELEMENTS)
        # Signed, although the codes are not: T5 casts activations to the type of other weights.
        self.register_frozen("weight", -(-out_features * in_features // 2), dtype=torch.int8)
        self.register_frozen(
            "scale", *((num_scales,) if packs_scales else (num_scales, FP32_BYTES))
        )
        if packs_scales:
            self.register_frozen(
                "scale_of_scales", -(-num_scales // SCALES_PER_BLOCK) + 1, FP32_BYTES
            )

    def pack(self, matrix: Tensor) -> None:
        """Quantize a matrix; a sharded parameter stores this rank's shard of it."""
        codes, state = packing.quantize_4bit(
            matrix,
            blocksize=BLOCK_ELEMENTS,
            quant_type=self.code,
            compress_statistics=self.packs_scales,
        )
        init.copy_into(self.weight, codes.flatten().view(torch.int8))
        if not self.packs_scales:
            init.copy_into(self.scale, _float_bytes(state.absmax))
            return
        init.copy_into(self.scale, state.absmax)
        mean = state.offset.reshape(1)
        init.copy_into(self.scale_of_scales, _float_bytes(torch.cat([state.state2.absmax, mean])))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Dequantized matrix."""
        scales = self.scale
        if self.packs_scales:
            scale_values = self.scale_of_scales.view(torch.float32).flatten()
            table = _dynamic_code(scales.device)
            scales = packing.dequantize_blockwise(
                scales, absmax=scale_values[:-1], code=table, blocksize=SCALES_PER_BLOCK
            )
            scales = scales + scale_values[-1]
        else:
            scales = scales.view(torch.float32).flatten()
        options = {"blocksize": BLOCK_ELEMENTS, "quant_type": self.code, "dtype": dtype}
        state = packing.QuantState(scales, self.shape, **options)
        return packing.dequantize_4bit(self.weight.view(torch.uint8).view(-1, 1), state)


class Int8Linear(PackedLinear):
    """One byte per element, with one scale per row."""

    scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, threshold: float
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.threshold = threshold
        self.register_frozen("weight", out_features, in_features, dtype=torch.int8)
        self.register_frozen("scale", out_features, FP32_BYTES)

    def pack(self, matrix: Tensor) -> None:
        """Quantize a matrix; a sharded parameter stores this rank's shard of it."""
        integers, scale, _ = packing.int8_vectorwise_quant(matrix.half())
        init.copy_into(self.weight, integers)
        init.copy_into(self.scale, _float_bytes(scale))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Dequantized matrix."""
        scale = self.scale.view(torch.float32) / INT8_MAX
        return self.weight.to(dtype).mul_(scale)

    def matmul(self, x: Tensor) -> Tensor:
        """``x W^T + bias``; on CUDA, with int8 inputs except for outliers."""
        return self.int8_matmul(x) if x.is_cuda else super().matmul(x)

    def int8_matmul(self, x: Tensor) -> Tensor:
        """``x W^T + bias`` by LLM.int8: int8 matmuls, outliers in 16 bits."""
        flat = x.reshape(-1, self.in_features)
        integers, scales, outliers = packing.int8_vectorwise_quant(flat.half(), self.threshold)
        product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            flat,
            integers,
            self.weight,
            scales,
            self.scale.view(torch.float32).flatten(),
            outliers,
            self.bias,
        )
        return cast(Tensor, product).view(*x.shape[:-1], self.out_features)


def _float_bytes(values: Tensor) -> Tensor:
    """Bytes of fp32 values, shape (numel, 4)."""
    return values.float().contiguous().view(-1, 1).view(torch.uint8)


@cache
def _dynamic_code(device: torch.device) -> Tensor:
    """The 256 code values of quantized scales."""
    with unset_fake_temporarily():  # the cache must not store a fake tensor
        table: Tensor = packing.create_dynamic_map()
        return table.to(device)


@singledispatch
def build_packed_linear(
    config: BitsAndBytesConfig, in_features: int, out_features: int, *, bias: bool
) -> PackedLinear:
    """Packed layer of a config, on the meta device."""
    raise not_registered(build_packed_linear, config)


@build_packed_linear.register(FourBitConfig)
def _build_four_bit(
    config: FourBitConfig, in_features: int, out_features: int, *, bias: bool
) -> PackedLinear:
    return FourBitLinear(
        in_features, out_features, bias=bias, code=config.code, packs_scales=config.double
    )


@build_packed_linear.register(Int8Config)
def _build_int8(
    config: Int8Config, in_features: int, out_features: int, *, bias: bool
) -> PackedLinear:
    return Int8Linear(in_features, out_features, bias=bias, threshold=config.threshold)


@replace_linears.register(BitsAndBytesConfig)
def _pack_linears(config: BitsAndBytesConfig, module: ModelModule, model: ModelConfig) -> None:
    module.replace_linears(config.packed_layers(model), partial(_build_packed_like, config))


def _build_packed_like(config: BitsAndBytesConfig, layer: nn.Linear) -> PackedLinear:
    out_features, in_features = layer.weight.shape
    return build_packed_linear(config, in_features, out_features, bias=layer.bias is not None)


@unpack_state_dict.register(BitsAndBytesConfig)
def _unpack(
    config: BitsAndBytesConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    unpacked = dict(state)
    for weight, layer in _iter_packed(config, model):
        parts = {
            part.name.rpartition(".")[2]: unpacked.pop(part.name)
            for part in config.packed_parts(weight)
        }
        layer.load_state_dict(parts, assign=True)
        unpacked[weight.name] = layer.unpack(torch.float32)
    return unpacked


@round_state_dict.register(BitsAndBytesConfig)
def _round(
    config: BitsAndBytesConfig, state: Mapping[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    rounded = dict(state)
    for weight, layer in _iter_packed(config, model):
        layer.to_empty(device=rounded[weight.name].device)
        layer.pack(rounded[weight.name])
        rounded[weight.name] = layer.unpack(torch.float32)
    return rounded


def _iter_packed(
    config: BitsAndBytesConfig, model: ModelConfig
) -> Iterator[tuple[Weight, PackedLinear]]:
    """Packed matrices of a model, each with a layer on the meta device."""
    for weight in model.weight_census():
        if config.is_packed(weight, model):
            out_features, in_features = weight.shape
            yield weight, build_packed_linear(config, in_features, out_features, bias=False)
