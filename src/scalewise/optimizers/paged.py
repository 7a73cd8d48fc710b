"""AdamW whose moments lie in memory that CUDA's driver moves to the host and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch.optim import AdamW


class PagedAdamW(AdamW):
    """Steps weight by weight with bitsandbytes' kernel (Dettmers et al., 2023, QLoRA, section 3).

    Moments are in fp32 whatever the format of a weight. On the CPU they are tensors like others.
    """

    state_place = torch.device("cpu")  # what is paged is a tensor of the host's to torch
    state_format = torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the closure, then the step; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":  # the host would read what is on its way
                torch.cuda.synchronize(device)
        return loss

    def _step(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = allocate_moment(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        functional.optimizer_update_32bit(
            "adam",
            gradient,
            parameter,
            state["exp_avg"],
            beta1,
            group["eps"],
            int(state["step"]),
            group["lr"],
            state["exp_avg_sq"],
            beta2,
            weight_decay=group["weight_decay"],
        )

    @torch.no_grad()
    def encode(self, parameter: nn.Parameter) -> None:
        """Puts the moments that a checkpoint held where they are paged."""
        state = self.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq"):
            state[slot] = allocate_moment(parameter).copy_(state[slot])


def allocate_moment(parameter: nn.Parameter) -> Tensor:
    """Returns a moment of a weight that has not moved yet."""
    if not parameter.is_cuda:
        return torch.zeros_like(parameter, dtype=torch.float32)
    paged: Tensor = functional.get_paged(*parameter.shape, device=parameter.device)
    return paged.zero_()
