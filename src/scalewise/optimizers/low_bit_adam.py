"""torchao's AdamW with moments of few bits, which does not compile its step on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchao.optim import AdamW4bit as Codes4
from torchao.optim import AdamW8bit as Codes8
from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

CHUNK = 1 << 20
"""Numbers whose codes are looked for at once, some 40 bytes each."""
LAST_PLACES = (0, 1, -1, 2, -2)
"""Distances in units in the last place at which a block's scale is looked for."""


class LowBitAdamBase(Optimizer):
    """What the two below add to torchao's."""

    _new_buffer: Callable[[Tensor, bool], Tensor]

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the closure, then the step; returns what the closure returned.

        A model that is compiled stays so in the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _uncompiled_step(self.param_groups[0]["params"][0]):
            super().step()
        return loss

    state_format = torch.float32  # in bf16 the numbers of a checkpoint would lose their codes

    @torch.no_grad()
    def encode(self, parameter: nn.Parameter) -> None:
        """Encodes the moments that a checkpoint holds as numbers.

        Blocks that were decoded from codes get codes that stand for the very same numbers, so a
        resumed run goes on bit by bit. Blocks that another sharding cut differently are rounded.
        """
        state = self.state[parameter]
        for slot, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            numbers, state[slot] = state[slot], self._new_buffer(parameter, signed)
            state[slot].copy_(numbers)
            _restore_scales(_local_tensor(state[slot]), _local_tensor(numbers))


class AdamW8bit(LowBitAdamBase, Codes8):  # type: ignore[misc]  # torchao is not typed
    """AdamW with moments of 8 bits."""


class AdamW4bit(LowBitAdamBase, Codes4):  # type: ignore[misc]  # torchao is not typed
    """AdamW with moments of 4 bits."""


def _local_tensor(tensor: Tensor) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _restore_scales(encoded: Any, moments: Tensor) -> None:
    """Finds the scale of each block that decodes to other numbers than those it was made from.

    torchao scales a block so that its largest magnitude becomes 1. The codes of signed moments
    reach 1 but not -1: a block whose largest magnitude was negative decodes to one that is
    smaller, and would shrink each time it is encoded. Its scale is that magnitude over the lowest
    code, up to a rounding in the last places.
    """
    if not (hasattr(encoded, "codes") and encoded.signed):
        return
    bits, size = (8 if isinstance(encoded, OptimState8bit) else 4), encoded.block_size
    quantize = quantize_8bit_with_qmap if bits == 8 else quantize_4bit_with_qmap
    wanted = moments.reshape(-1, size)
    decoded = encoded.dequantize(torch.float32).reshape(-1, size)
    codes = encoded.codes.view(-1, size * bits // 8)
    for rows in (decoded != wanted).any(1).nonzero()[:, 0].split(CHUNK // size):
        for places in LAST_PLACES:
            block = wanted[rows]
            nearby = (block.abs().amax(1) / -encoded.qmap[0]).view(torch.int32) + places
            scale = nearby.view(torch.float32)
            found = quantize(block / scale[:, None], encoded.qmap)
            same = (encoded.qmap[found.int()] * scale[:, None] == block).all(1)
            done, found = rows[same], found[same]
            encoded.scale[done] = scale[same]
            codes[done] = found if bits == 8 else (found[:, ::2] << 4) | found[:, 1::2]
            rows = rows[~same]


@contextmanager
def _uncompiled_step(parameter: Tensor) -> Iterator[None]:
    """Runs torchao's step as it is on the CPU: a kernel for each shape would take minutes there."""
    if parameter.device.type == "cpu":
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
