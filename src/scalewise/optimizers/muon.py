"""Muon, whose data-parallel ranks each orthogonalize some of the matrices; else AdamW.

Shape suffixes: K matrices of equal shape; R rows; C columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Muon, Optimizer

from scalewise.compat.torch import adjust_lr, matrices_of_group
from scalewise.models.init import local_tensor
from scalewise.optimizers.build import build_from_groups, compile_updates, set_replicas
from scalewise.optimizers.config import MuonConfig, batch_size
from scalewise.optimizers.implementations import evaluate_closure
from scalewise.torch_compile import Compile

Coefficients = tuple[float, float, float]


class Matrix(NamedTuple):
    """A parameter with the tensors of its update; shards of this rank if it is sharded."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    group: dict[str, Any]


class DistributedMuon(Muon):
    """torch's Muon; ranks with the same or with sharded updates divide the matrices among them.

    Matrices of equal shape are orthogonalized in rounds: each rank gets different ones, by an
    all-to-all of their shards, and returns the results in bf16.
    """

    replicas: ProcessGroup | None = None
    """Ranks with equal gradients of unsharded parameters; None: no other rank."""

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.orthogonalize: Callable[..., Tensor] = newton_schulz

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix by its orthogonalized momentum."""
        loss = evaluate_closure(closure)
        matrices: dict[tuple[object, ...], list[Matrix]] = {}
        for group in self.param_groups:
            for parameter, gradient, momentum in matrices_of_group(self, group):
                matrix = Matrix(parameter, local_tensor(gradient), local_tensor(momentum), group)
                matrices.setdefault((parameter.shape, parameter.dtype), []).append(matrix)
        for same_shape in matrices.values():
            first = same_shape[0].parameter
            exchange = self._exchange_of(first)
            count = exchange.ranks * batch_size(first.numel(), on_cuda=first.is_cuda)
            for start in range(0, len(same_shape), count):
                self._update_matrices(same_shape[start : start + count], exchange)
        return loss

    def _exchange_of(self, parameter: Tensor) -> Exchange:
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if isinstance(placement, Shard) and parameter.device_mesh.size(axis) > 1:
                    return ShardExchange(parameter.device_mesh.get_group(axis), parameter.shape[0])
            return Exchange()  # replicas of a mesh compute the same
        return Exchange() if self.replicas is None else ReplicaExchange(self.replicas)

    def _update_matrices(self, matrices: Sequence[Matrix], exchange: Exchange) -> None:
        updates_KRC = torch.stack([_momentum_update(matrix).bfloat16() for matrix in matrices])
        settings = matrices[0].group
        own_KRC = exchange.take(updates_KRC)
        del updates_KRC
        if own_KRC.numel():
            own_KRC = self.orthogonalize(
                own_KRC, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
            )
        for matrix, update in zip(matrices, exchange.give(own_KRC, len(matrices)), strict=True):
            group, weight = matrix.group, local_tensor(matrix.parameter)
            rate = adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.parameter.shape)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-rate)


class Exchange:
    """Assignment of matrices to ranks; this class: one rank orthogonalizes all of them."""

    ranks = 1

    def take(self, updates_KRC: Tensor) -> Tensor:
        """Unsharded updates of the matrices of this rank: every ``ranks``-th one."""
        return updates_KRC

    def give(self, own_KRC: Tensor, count: int) -> Iterable[Tensor]:
        """Orthogonalized updates of all ``count`` matrices; this rank's shards of sharded ones."""
        return own_KRC


class ReplicaExchange(Exchange):
    """Every rank has the updates of all matrices, and gathers the results of the others."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self.ranks = group, group.rank(), group.size()

    def take(self, updates_KRC: Tensor) -> Tensor:
        """Every ``ranks``-th update."""
        return updates_KRC[self._rank :: self.ranks]

    def give(self, own_KRC: Tensor, count: int) -> Iterable[Tensor]:
        """All-gather the results; ranks with fewer matrices send padding."""
        most = -(-count // self.ranks)
        padded_KRC = own_KRC.new_zeros((most, *own_KRC.shape[1:]))
        padded_KRC[: len(own_KRC)] = own_KRC
        gathered = own_KRC.new_empty((self.ranks, *padded_KRC.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), padded_KRC, group=self._group)
        return gathered.transpose(0, 1).flatten(0, 1)[:count]


class ShardExchange(Exchange):
    """Every rank has some rows of all matrices."""

    def __init__(self, group: ProcessGroup, rows: int) -> None:
        self._group, self._rank, self.ranks = group, group.rank(), group.size()
        chunk = -(-rows // self.ranks)
        self._rows = [max(0, min(chunk, rows - rank * chunk)) for rank in range(self.ranks)]

    def take(self, updates_KRC: Tensor) -> Tensor:
        """Exchange rows of all matrices for all rows of some."""
        columns = updates_KRC.shape[2]
        sent = [updates_KRC[owner :: self.ranks] for owner in range(self.ranks)]
        own_count = len(sent[self._rank])
        received = self._all_to_all(sent, [(own_count, rows, columns) for rows in self._rows])
        return torch.cat(received, 1)

    def give(self, own_KRC: Tensor, count: int) -> Iterable[Tensor]:
        """Exchange all rows of some matrices for rows of all."""
        columns, rows = own_KRC.shape[2], self._rows[self._rank]
        counts = [len(range(owner, count, self.ranks)) for owner in range(self.ranks)]
        received = self._all_to_all(
            own_KRC.split(self._rows, 1), [(owned, rows, columns) for owned in counts]
        )
        return [received[index % self.ranks][index // self.ranks] for index in range(count)]

    def _all_to_all(
        self, sent: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]]
    ) -> list[Tensor]:
        """Send one tensor to each rank, and receive one of ``shapes`` from each."""
        sizes = [owned * rows * columns for owned, rows, columns in shapes]
        buffer = torch.cat([tensor.flatten() for tensor in sent])
        received = buffer.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, buffer, sizes, [tensor.numel() for tensor in sent], group=self._group
        )
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


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
        loss = evaluate_closure(closure)
        for part in self.parts:
            part.step()
        return loss


def newton_schulz(
    updates_KRC: Tensor, coefficients: Coefficients, steps: int, epsilon: float
) -> Tensor:
    """Orthogonalize matrices approximately, in bf16 (Jordan et al., 2024).

    A quintic iteration whose coefficients are steep at zero: singular values end near 1.
    """
    a, b, c = coefficients
    is_tall = updates_KRC.shape[1] > updates_KRC.shape[2]
    x_KRC = updates_KRC.mT if is_tall else updates_KRC
    norms_K11 = torch.linalg.vector_norm(updates_KRC, dim=(1, 2), keepdim=True)
    x_KRC = x_KRC / norms_K11.clamp(min=epsilon)
    for _ in range(steps):
        gram_KRR = x_KRC @ x_KRC.mT
        factor_KRR = torch.baddbmm(gram_KRR, gram_KRR, gram_KRR, beta=b, alpha=c)
        x_KRC = torch.baddbmm(x_KRC, factor_KRR, x_KRC, beta=a)
    return x_KRC.mT if is_tall else x_KRC


def _momentum_update(matrix: Matrix) -> Tensor:
    """Update the momentum, and return the update before its orthogonalization."""
    gradient, momentum, group = matrix.gradient, matrix.momentum, matrix.group
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


@set_replicas.register(MuonConfig)
def _divide_matrices(config: MuonConfig, optimizer: Optimizer, replicas: ProcessGroup) -> None:
    for part in _muon_parts(optimizer):
        part.replicas = replicas


@compile_updates.register(MuonConfig)
def _compile_orthogonalization(
    config: MuonConfig, optimizer: Optimizer, compile_config: Compile
) -> None:
    for part in _muon_parts(optimizer):
        part.orthogonalize = torch.compile(newton_schulz, backend=compile_config.backend.value)


def _muon_parts(optimizer: Optimizer) -> list[DistributedMuon]:
    parts = getattr(optimizer, "parts", [optimizer])
    return [part for part in parts if isinstance(part, DistributedMuon)]


@build_from_groups.register(MuonConfig)
def _build_muon(config: MuonConfig, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Build Muon and torch's AdamW as one optimizer, or the only one that has groups."""
    groups_by_hidden: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in groups:
        groups_by_hidden[group.pop("hidden")].append(group)
    optimizers: list[Optimizer] = []
    if groups_by_hidden[True]:
        optimizers.append(
            DistributedMuon(
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
