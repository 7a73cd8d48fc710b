"""The norm of a gradient whose pieces lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def total(gradients: Iterable[Tensor], stages: int, device: torch.device) -> Tensor:
    """Returns the 2-norm of all ``gradients`` together, a scalar that is equal on every rank.

    Each of ``stages`` pipeline ranks has its own. Every rank adds the squares of what it holds,
    divided by the number of ranks that hold the same, and one sum over all ranks joins them.
    """
    holders: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        copies = dist.get_world_size() // (stages * _pieces(gradient))
        holders.setdefault(copies, []).append(local(gradient))
    square = torch.zeros((), dtype=torch.float32, device=device)
    for copies, held in holders.items():
        square += nn.utils.get_total_norm(held).to(device).float() ** 2 / copies
    dist.all_reduce(square)
    return square.sqrt()


def scale(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scales gradients in place so that their norm, ``norm`` now, is ``limit`` at the most."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    held = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if held:
        torch._foreach_mul_(held, factor.to(held[0].device))


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pieces(gradient: Tensor) -> int:
    """Returns into how many pieces a gradient is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in placed if not isinstance(placement, Replicate))
