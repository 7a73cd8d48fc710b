"""AdamW whose moments lie in host memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.adamw import adamw

HOST = torch.device("cpu")


class CPUOffloadAdamW(AdamW):
    """Steps weight by weight on the host: it comes there with its gradient, and goes back.

    The next is on its way while one is stepped. ZeRO-Offload steps there as well, and keeps the
    weights in fp32 there too (Ren et al., 2021).
    """

    state_place = HOST

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the closure, then the step; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        coming = (
            PendingTransfer(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        for one, _ in pairwise(chain(coming, (None,))):
            assert one is not None
            self._step_parameter(one)
        return loss

    def _step_parameter(self, transfer: PendingTransfer) -> None:
        state, group = self.state[transfer.parameter], transfer.group
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = torch.zeros_like(transfer.weight)
        beta1, beta2 = group["betas"]
        transfer.wait()
        adamw(
            [transfer.weight],
            [transfer.gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        transfer.parameter.copy_(transfer.weight, non_blocking=True)


class PendingTransfer:
    """A weight and its gradient on their way to the host, where they may be already."""

    def __init__(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        self.parameter, self.group = parameter, group
        self.weight, self.gradient = (
            _start_transfer(parameter.detach()),
            _start_transfer(parameter.grad),
        )
        self._event: torch.cuda.Event | None = None
        if parameter.is_cuda:
            self._event = torch.cuda.current_stream(parameter.device).record_event()

    def wait(self) -> None:
        """Returns when both are there."""
        if self._event is not None:
            self._event.synchronize()


def _start_transfer(tensor: Tensor) -> Tensor:
    if tensor.device == HOST:
        return tensor
    there = torch.empty_like(tensor, device=HOST, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)
