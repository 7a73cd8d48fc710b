"""Optimizers by torch and schedulefree; Lion, sharded Muon, and AdamW with CPU offload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.adamw import adamw

from scalewise.compat.torch import adjust_lr, matrices_of_group, orthogonalize
from scalewise.optimizers.build import average_weights, build_from_groups
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
)

HOST = torch.device("cpu")


def _with_closure(closure: Callable[[], Any] | None) -> Any:
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
        loss = _with_closure(closure)
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
        loss = _with_closure(closure)
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


class ShardedMuon(Muon):
    """torch's Muon for sharded parameters: ranks orthogonalize gathered updates."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix by its orthogonalized momentum."""
        loss = _with_closure(closure)
        for group in self.param_groups:
            for parameter, gradient, momentum in matrices_of_group(self, group):
                self._update_parameter(parameter, gradient, momentum, group)
        return loss

    def _update_parameter(
        self, parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]
    ) -> None:
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        full_update = update.full_tensor() if isinstance(update, DTensor) else update
        orthogonal = orthogonalize(
            full_update, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        if isinstance(update, DTensor):
            mesh, placements = update.device_mesh, update.placements
            orthogonal = distribute_tensor(orthogonal, mesh, placements, src_data_rank=None)
        rate = adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal, alpha=-rate)


class CombinedOptimizer(Optimizer):
    """Several optimizers as one, with their parameter groups and their state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.state = defaultdict(dict)
        for part in parts:
            part.state = self.state  # shared, as the groups are

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer."""
        loss = _with_closure(closure)
        for part in self.parts:
            part.step()
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


@build_from_groups.register(MuonConfig)
def _build_muon(config: MuonConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Build Muon and torch's AdamW as one optimizer, or the only one that has groups."""
    groups_by_hidden: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in groups:
        groups_by_hidden[group.pop("hidden")].append(group)
    optimizers: list[Optimizer] = []
    if groups_by_hidden[True]:
        optimizers.append(
            ShardedMuon(
                groups_by_hidden[True],
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if groups_by_hidden[False]:
        betas = (config.beta1, config.beta2)
        adamw = optim.AdamW(
            groups_by_hidden[False], lr=config.lr, betas=betas, eps=config.epsilon, fused=True
        )
        optimizers.append(adamw)
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


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
