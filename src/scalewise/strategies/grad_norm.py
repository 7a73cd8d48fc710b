"""Gradient norm over all ranks, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from scalewise.compat.torch import multiply_all_
from scalewise.models.init import local_tensor

ROW_ELEMENTS = 1024
"""Elements whose squares are added one after the other on the CPU."""


def tensors_norm(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm of all ``tensors`` together, a scalar.

    On the CPU, torch adds squares one after the other: 16 million elements lose 6e-4 of the norm in
    fp32, and shards of them lose less, so that parallelism strategies would clip differently. Norms
    of short rows, combined, do not have this error.
    """
    return nn.utils.get_total_norm([part for tensor in tensors for part in _row_norms(tensor)])


def _row_norms(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.device.type != "cpu":
        return (tensor,)
    if tensor.numel() <= ROW_ELEMENTS:
        return (tensor.float(),)
    flat = tensor.reshape(-1)
    rows = flat[: len(flat) // ROW_ELEMENTS * ROW_ELEMENTS].view(-1, ROW_ELEMENTS)
    row_norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return (*_row_norms(row_norms), flat[rows.numel() :].float())


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


def clip_to_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
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
