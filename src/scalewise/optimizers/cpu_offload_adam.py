"""AdamW with moments in host memory."""

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
    """AdamW that updates parameters one by one on the host (Ren et al., 2021, ZeRO-Offload).

    Each parameter is copied to the host with its gradient, and back. The transfer of the next one
    overlaps with the update. Unlike ZeRO-Offload, no copy of the parameters in fp32 is stored.
    """

    state_device = HOST

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, update all parameters, and return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        transfers = (
            PendingTransfer(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        for transfer, _ in pairwise(chain(transfers, (None,))):
            assert transfer is not None
            self._step_parameter(transfer)
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
    """Asynchronous copy of a parameter and its gradient to the host."""

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
        """Wait until both copies are complete."""
        if self._event is not None:
            self._event.synchronize()


def _start_transfer(tensor: Tensor) -> Tensor:
    if tensor.device == HOST:
        return tensor
    host_tensor = torch.empty_like(tensor, device=HOST, pin_memory=True)
    return host_tensor.copy_(tensor, non_blocking=True)
