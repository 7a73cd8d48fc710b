"""Optimizers by torch and schedulefree; Lion, and AdamW with CPU offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from scalewise.optimizers.build import average_weights, build_from_groups
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    ScheduleFreeConfig,
    SGDConfig,
)

HOST = torch.device("cpu")


def evaluate_closure(closure: Callable[[], Any] | None) -> Any:
    """Result of the closure of an optimizer step, computed with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CPUOffloadAdamW(AdamW):
    """AdamW that updates parameters one by one on the host (Ren et al., 2021, ZeRO-Offload).

    Each parameter is copied to the host with its gradient, and back. The transfer of the next one
    overlaps with the update. Unlike ZeRO-Offload, no copy of the parameters in fp32 is stored.
    """

    state_device = HOST

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, update all parameters, and return the closure's result."""
        loss = evaluate_closure(closure)
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


class Lion(Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    Parameters are updated one by one: updates of all at once would take the memory of all
    parameters.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every element by the learning rate, in the direction of the momentum's sign."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum_buffer"], parameter.grad
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=-lr)
                momentum.lerp_(gradient, 1 - beta2)
        return loss


@build_from_groups.register(SGDConfig)
def _build_sgd(config: SGDConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    return optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


@build_from_groups.register(LionConfig)
def _build_lion(config: LionConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    return Lion(groups, lr=config.lr, betas=(config.beta1, config.beta2))


@build_from_groups.register(AdamWConfig)
def _build_adamw(config: AdamWConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    betas = (config.beta1, config.beta2)
    settings: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.epsilon}
    if config.offload:
        return CPUOffloadAdamW(list(groups), **settings)
    return optim.AdamW(groups, **settings, fused=config.fused)


@build_from_groups.register(AdafactorConfig)
def _build_adafactor(config: AdafactorConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    return optim.Adafactor(groups, lr=config.lr, beta2_decay=config.beta2_decay)


@build_from_groups.register(ScheduleFreeConfig)
def _build_schedule_free(config: ScheduleFreeConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Build the authors' AdamW, in training mode."""
    from schedulefree import AdamWScheduleFree  # an optional package

    optimizer: Any = AdamWScheduleFree(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        foreach=False,  # foreach would take a copy of every parameter
    )
    optimizer.train()
    return cast("Optimizer", optimizer)


@average_weights.register(ScheduleFreeConfig)
def _average_iterates(
    config: ScheduleFreeConfig, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Average x, computed from the weights y = beta1 x + (1 - beta1) z and the state z."""
    z_weight = 1 - 1 / config.beta1
    return {
        name: torch.lerp(y, state[f"z/{name}"].to(y.dtype), z_weight) if f"z/{name}" in state else y
        for name, y in weights.items()
    }
