"""torchao's AdamW with moments of few bits, which does not compile its step on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.optim import AdamW4bit as Codes4
from torchao.optim import AdamW8bit as Codes8


class Blockwise(Optimizer):
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
        with _not_compiled(self.param_groups[0]["params"][0]):
            super().step()
        return loss

    @torch.no_grad()
    def encode(self, parameter: nn.Parameter) -> None:
        """Makes codes again of the moments that a checkpoint held as numbers."""
        state = self.state[parameter]
        for slot, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            numbers, state[slot] = state[slot], self._new_buffer(parameter, signed)
            state[slot].copy_(numbers)


class AdamW8bit(Blockwise, Codes8):  # type: ignore[misc]  # torchao is not typed
    """AdamW with moments of 8 bits."""


class AdamW4bit(Blockwise, Codes4):  # type: ignore[misc]  # torchao is not typed
    """AdamW with moments of 4 bits."""


@contextmanager
def _not_compiled(parameter: Tensor) -> Iterator[None]:
    """Runs torchao's step as it is on the CPU: a kernel for each shape would take minutes there."""
    if parameter.device.type == "cpu":
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
