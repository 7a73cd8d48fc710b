"""torchao's AdamW with quantized moments; on the CPU, its step is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.optim import AdamW4bit as Codes4
from torchao.optim import AdamW8bit as Codes8
from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from scalewise.models.init import local_tensor
from scalewise.optimizers.build import build_from_groups
from scalewise.optimizers.config import LowBitAdamWConfig

CHUNK_ELEMENTS = 1 << 20
"""Elements whose codes are searched for at once, with about 40 bytes each."""
SCALE_ULPS = (0, 1, -1, 2, -2)
"""Distances at which a block's scale is searched for, in units in the last place."""


class LowBitAdamBase(Optimizer):
    """Additions to torchao's optimizers: uncompiled steps on the CPU, and resuming."""

    _new_buffer: Callable[[Tensor, bool], Tensor]

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, update all parameters, and return the closure's result.

        A compiled model stays compiled in the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _uncompiled_step(self.param_groups[0]["params"][0]):
            super().step()
        return loss

    state_dtype = torch.float32  # bf16 would not reproduce the codes

    @torch.no_grad()
    def encode(self, parameter: nn.Parameter) -> None:
        """Quantize the moments that a checkpoint stores in fp32.

        Blocks that were dequantized get codes with the same values, so that a resumed run is
        identical bitwise. Blocks that another sharding has divided differently are rounded.
        """
        state = self.state[parameter]
        for slot, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            moments, state[slot] = state[slot], self._new_buffer(parameter, signed)
            state[slot].copy_(moments)
            _restore_scales(local_tensor(state[slot]), local_tensor(moments))


class AdamW8bit(LowBitAdamBase, Codes8):  # type: ignore[misc]  # torchao is not typed
    """AdamW with 8-bit moments."""


class AdamW4bit(LowBitAdamBase, Codes4):  # type: ignore[misc]  # torchao is not typed
    """AdamW with 4-bit moments."""


@build_from_groups.register(LowBitAdamWConfig)
def _build_low_bit_adamw(config: LowBitAdamWConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    optimizer_class = AdamW8bit if config.bits == 8 else AdamW4bit
    return optimizer_class(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        block_size=config.block,
    )


def _restore_scales(encoded: Any, moments: Tensor) -> None:
    """Correct the scale of each block whose codes do not reproduce ``moments``.

    torchao scales a block so that its largest magnitude becomes 1. The codes of signed moments
    reach 1 but not -1: a block whose largest magnitude was negative is dequantized to a smaller
    one, and would shrink at each quantization. Its scale is that magnitude divided by the lowest
    code, up to a rounding of the last bits.
    """
    if not (hasattr(encoded, "codes") and encoded.signed):
        return
    bits, size = (8 if isinstance(encoded, OptimState8bit) else 4), encoded.block_size
    quantize = quantize_8bit_with_qmap if bits == 8 else quantize_4bit_with_qmap
    blocks = moments.reshape(-1, size)
    decoded = encoded.dequantize(torch.float32).reshape(-1, size)
    codes = encoded.codes.view(-1, size * bits // 8)
    for rows in (decoded != blocks).any(1).nonzero()[:, 0].split(CHUNK_ELEMENTS // size):
        for ulps in SCALE_ULPS:
            block = blocks[rows]
            scale_bits = (block.abs().amax(1) / -encoded.qmap[0]).view(torch.int32) + ulps
            scale = scale_bits.view(torch.float32)
            block_codes = quantize(block / scale[:, None], encoded.qmap)
            matches = (encoded.qmap[block_codes.int()] * scale[:, None] == block).all(1)
            matched_rows, block_codes = rows[matches], block_codes[matches]
            encoded.scale[matched_rows] = scale[matches]
            codes[matched_rows] = (
                block_codes if bits == 8 else (block_codes[:, ::2] << 4) | block_codes[:, 1::2]
            )
            rows = rows[~matches]


@contextmanager
def _uncompiled_step(parameter: Tensor) -> Iterator[None]:
    """Run torchao's step uncompiled on the CPU, where a kernel per shape takes minutes."""
    if parameter.device.type == "cpu":
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
