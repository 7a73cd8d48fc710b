"""Weight initialization that is independent of sharding: one seed per parameter name."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


class PackedMatrix(ABC):
    """Weight matrix stored in a packed (quantized) format."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the unpacked matrix."""

    @property
    @abstractmethod
    def storage_tensor(self) -> Tensor:
        """Tensor with the device and the sharding of the stored matrix."""

    @abstractmethod
    def pack(self, matrix: Tensor) -> None:
        """Quantize ``matrix`` and store it; with sharding, each rank stores its own shard."""


@torch.no_grad()
def init_normal(name: str, parameter: nn.Parameter | PackedMatrix, seed: int, std: float) -> None:
    """Fill a parameter, or this rank's shard of it, with samples of N(0, ``std``^2).

    The generator is seeded with ``seed`` and ``name``. At most one unsharded tensor exists at a
    time.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # The mesh's device generates the values, so that a shard offloaded to the CPU gets the same.
    sharded = (
        parameter.storage_tensor if isinstance(parameter, PackedMatrix) else cast(Tensor, parameter)
    )
    device: str | torch.device = sharded.device
    if isinstance(sharded, DTensor):
        device = sharded.device_mesh.device_type
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
    full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    copy_into(parameter, full.normal_(0.0, std, generator=generator))


@torch.no_grad()
def copy_into(parameter: Tensor | PackedMatrix, source: Tensor) -> None:
    """Copy an unsharded tensor into a parameter, or this rank's slice of it into its shard.

    No communication: every rank has ``source``.
    """
    if isinstance(parameter, PackedMatrix):
        parameter.pack(source)
    elif isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.to_local().copy_(
            distribute_tensor(source, mesh, placements, src_data_rank=None).to_local()
        )
    else:
        parameter.copy_(source)


def local_tensor(tensor: Tensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """Local shard of a DTensor; other tensors unchanged.

    ``grad_placements``: placements of its gradient; None: those of the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=grad_placements)


@torch.no_grad()
def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded tensor of a parameter; a collective call if it is a DTensor."""
    if isinstance(parameter, DTensor):
        # The mesh's process group cannot gather a shard that is offloaded to the CPU.
        on_device = cast(DTensor, parameter.to(parameter.device_mesh.device_type))
        return on_device.full_tensor()
    return parameter
