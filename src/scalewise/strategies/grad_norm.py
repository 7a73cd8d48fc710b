"""The norm of a gradient, also where its pieces lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

ROW = 1024
"""Numbers whose squares are added up one after the other on the CPU."""


def tensors_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of all ``tensors`` together, a scalar.

    On the CPU torch adds squares up in a row: 16 million of them lose 6e-4 of the norm in fp32,
    and pieces of them less, so that layouts would clip differently. Rows of few lose nothing.
    """
    return nn.utils.get_total_norm([part for tensor in tensors for part in _row_norms(tensor)])


def _row_norms(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.device.type != "cpu":
        return (tensor,)
    if tensor.numel() <= ROW:
        return (tensor.float(),)
    flat = tensor.reshape(-1)
    rows = flat[: len(flat) // ROW * ROW].view(-1, ROW)
    whole = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return (*_row_norms(whole), flat[rows.numel() :].float())


def global_grad_norm(gradients: Iterable[Tensor], stages: int, device: torch.device) -> Tensor:
    """Returns the 2-norm of all ``gradients`` together, a scalar that is equal on every rank.

    Each of ``stages`` pipeline ranks has its own. Every rank adds the squares of what it holds,
    divided by the number of ranks that hold the same, and one sum over all ranks joins them.
    """
    holders: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        copies = dist.get_world_size() // (stages * _num_shards(gradient))
        holders.setdefault(copies, []).append(local_tensor(gradient))
    square = torch.zeros((), dtype=torch.float32, device=device)
    for copies, held in holders.items():
        square += tensors_norm(held).to(device).float() ** 2 / copies
    dist.all_reduce(square)
    return square.sqrt()


def squared_grad_norm(gradient: Tensor) -> Tensor:
    """Returns this rank's part of the square of a gradient's 2-norm: ranks add theirs up."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return tensors_norm([local_tensor(gradient)]) ** 2 / (ranks // _num_shards(gradient))


def clip_to_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that their norm, ``norm`` now, is ``max_norm`` at the most."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    held = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if held:
        torch._foreach_mul_(held, factor.to(held[0].device))


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_shards(gradient: Tensor) -> int:
    """Returns into how many pieces a gradient is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in placed if not isinstance(placement, Replicate))
