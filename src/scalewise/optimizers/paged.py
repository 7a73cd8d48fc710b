"""AdamW with moments in CUDA unified memory, which the driver pages to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from scalewise.optimizers.build import build_from_groups
from scalewise.optimizers.config import PagedAdamWConfig


class PagedAdamW(AdamW):
    """AdamW with bitsandbytes' kernel, one parameter at a time (Dettmers et al., 2023, section 3).

    Moments are in fp32 for parameters of any data type. On the CPU, nothing is paged.
    """

    state_device = torch.device("cpu")  # torch treats paged tensors as host tensors
    state_dtype = torch.float32
    _last_step: torch.cuda.Event | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, update all parameters, and return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        device = self.param_groups[0]["params"][0].device
        if device.type == "cuda":
            self._last_step = torch.cuda.current_stream(device).record_event()
        return loss

    def wait_for_state(self) -> None:
        """Wait until the kernels of the last step have written the moments.

        The host reads paged memory without a copy that the stream would order.
        """
        if self._last_step is not None:
            self._last_step.synchronize()

    def _step(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = allocate_moment(parameter)
        if parameter.is_cuda:  # one transfer of each moment instead of a page fault per page
            for slot in ("exp_avg", "exp_avg_sq"):
                functional.prefetch_tensor(state[slot])
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
        """Move the moments of a checkpoint to paged memory."""
        self.wait_for_state()
        state = self.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq"):
            state[slot] = allocate_moment(parameter).copy_(state[slot])


def allocate_moment(parameter: nn.Parameter) -> Tensor:
    """Moment of a parameter before the first step, in paged memory on CUDA."""
    if not parameter.is_cuda:
        return torch.zeros_like(parameter, dtype=torch.float32)
    paged: Tensor = functional.get_paged(*parameter.shape, device=parameter.device)
    return paged.zero_()


@build_from_groups.register(PagedAdamWConfig)
def _build_paged_adamw(config: PagedAdamWConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Build AdamW with bitsandbytes' kernel.

    Its temporary tensors on the CPU, about 12 bytes per element of one parameter, are not modeled.
    """
    betas = (config.beta1, config.beta2)
    return PagedAdamW(list(groups), lr=config.lr, betas=betas, eps=config.epsilon)
