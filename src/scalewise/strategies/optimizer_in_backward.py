"""Optimizer steps during the backward pass: gradients are not stored together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from scalewise.strategies import grad_norm


class OptimizerInBackward:
    """Steps each parameter when its gradient is accumulated, then frees the gradient.

    Each parameter is a parameter group of its own. The regular optimizer step finds no gradients
    and does nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._squared_norm = torch.zeros((), dtype=torch.float32, device=device)
        parts: list[Any] = getattr(optimizer, "parts", [optimizer])
        for part in parts:
            for group in part.param_groups:
                (parameter,) = group["params"]
                parameter.register_post_accumulate_grad_hook(partial(self._step, part, group))

    def take_grad_norm(self) -> Tensor:
        """2-norm of all gradients since the last call, equal on every rank; resets it."""
        square = self._squared_norm.clone()
        self._squared_norm.zero_()
        if dist.is_initialized():
            dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def _step(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._squared_norm += grad_norm.squared_grad_norm(parameter.grad).to(
            self._squared_norm.device
        )
        all_groups, optimizer.param_groups = optimizer.param_groups, [group]
        optimizer.step()
        optimizer.param_groups = all_groups
        parameter.grad = None
