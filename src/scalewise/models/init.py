"""Fresh weights that no layout changes: each parameter is drawn from a seed made of its name."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class PackedMatrix(ABC):
    """A matrix that is held in few bits: whatever is put into it is packed."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Returns that of the matrix."""

    @property
    @abstractmethod
    def storage_tensor(self) -> Tensor:
        """Returns a tensor that lies where the matrix does, sharded as it is."""

    @abstractmethod
    def pack(self, matrix: Tensor) -> None:
        """Packs a matrix; of sharded tensors each rank takes its own."""


@torch.no_grad()
def init_normal(name: str, parameter: nn.Parameter | PackedMatrix, seed: int, std: float) -> None:
    """Fills a parameter, or this rank's shard of it, with normal numbers of deviation ``std``.

    At no time is more than one whole tensor held beside the shards.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # The mesh's kind of device draws, though an offloaded shard lies on the host.
    sharded = (
        parameter.storage_tensor if isinstance(parameter, PackedMatrix) else cast(Tensor, parameter)
    )
    device: str | torch.device = sharded.device
    if isinstance(sharded, DTensor):
        device = sharded.device_mesh.device_type
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    copy_into(parameter, whole.normal_(0.0, std, generator=generator))


@torch.no_grad()
def copy_into(parameter: Tensor | PackedMatrix, source: Tensor) -> None:
    """Copies a whole tensor into a parameter, or this rank's part of it into its shard.

    Nothing is sent: every rank holds ``source`` and takes its own.
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


@torch.no_grad()
def full_tensor(parameter: Tensor) -> Tensor:
    """Returns all of a parameter, gathered where ranks share it out: each of them has to ask."""
    if isinstance(parameter, DTensor):
        # An offloaded shard lies on the host, of which the mesh knows nothing.
        there = cast(DTensor, parameter.to(parameter.device_mesh.device_type))
        return there.full_tensor()
    return parameter
