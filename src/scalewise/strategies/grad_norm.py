"""Gradient norm over all ranks, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from scalewise.compat.torch import multiply_all_, norm_of_each
from scalewise.models.init import local_tensor

ROW_ELEMENTS = 1024
"""Elements whose squares are added one after the other on the CPU."""


def tensors_norm(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm of all ``tensors`` together, a scalar.

    On the CPU, torch adds squares one after the other: 16 million elements lose 6e-4 of the norm in
    fp32, and shards of them lose less, so that parallelism strategies would clip differently. Norms
    of short rows, combined, do not have this error.
    """
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if not on_cpu:
        return nn.utils.get_total_norm(tensors, foreach=True)
    norm = _norm_by_rows(on_cpu)
    if len(on_cpu) == len(tensors):
        return norm
    others = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    return nn.utils.get_total_norm([*others, norm], foreach=True)


def _norm_by_rows(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm of CPU tensors together: of the norms of rows, the norms of rows of these, ..."""
    short_tensors, groups = [], []
    for tensor in tensors:
        remainders: list[Tensor | None] = []
        while (size := tensor.numel()) > ROW_ELEMENTS:
            remainder = None
            if length := size % ROW_ELEMENTS:
                flat = tensor.reshape(-1)
                tensor, remainder = flat[:-length], flat[-length:].float()
            remainders.append(remainder)
            rows = tensor.reshape(-1, ROW_ELEMENTS)
            tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        group = [tensor.float(), *reversed(remainders)]
        short_tensors += [part for part in group if part is not None]
        groups += group
    # Zeros fix the order of the sum, which depends on the number of terms.
    norms, zero = iter(norm_of_each(short_tensors)), torch.zeros((), device="cpu")
    norms_by_part = torch.stack([zero if part is None else next(norms) for part in groups])
    norm: Tensor = torch.linalg.vector_norm(norms_by_part)
    return norm


def global_grad_norm(gradients: Iterable[Tensor], stages: int, device: torch.device) -> Tensor:
    """2-norm of all ``gradients`` together, a scalar that is equal on every rank.

    Each of ``stages`` pipeline stages has other gradients. Every rank adds the squares of its local
    shards, divided by the number of ranks with the same shards; one all-reduce adds the sums.
    """
    gradients_by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        copies = dist.get_world_size() // (stages * _num_shards(gradient))
        gradients_by_copies.setdefault(copies, []).append(local_tensor(gradient))
    square = torch.zeros((), dtype=torch.float32, device=device)
    for copies, local_gradients in gradients_by_copies.items():
        square += tensors_norm(local_gradients).to(device).float() ** 2 / copies
    dist.all_reduce(square)
    return square.sqrt()


def squared_grad_norm(gradient: Tensor) -> Tensor:
    """This rank's term of the squared 2-norm of a gradient; the sum over ranks is the square."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return tensors_norm([local_tensor(gradient)]) ** 2 / (ranks // _num_shards(gradient))


def clip_to_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | Tensor, norm: Tensor
) -> None:
    """Scale gradients in place to a 2-norm of at most ``max_norm``.

    ``norm``: their 2-norm before.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local_gradients = [
        local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if local_gradients:
        multiply_all_(local_gradients, factor.to(local_gradients[0].device))


def _num_shards(gradient: Tensor) -> int:
    """Number of shards of a gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh_placements = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in mesh_placements if not isinstance(placement, Replicate))
