"""Shards that are no box of their tensor, as checkpoints store them: in contiguous rows.

Tensor parallelism shards the rows of each expert in a stacked matrix. Checkpoints need one box per
rank: the ranks exchange rows when they save and load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from scalewise.compat.torch_distributed import is_strided_shard


def has_strided_rows(tensor: Tensor) -> bool:
    """Whether the innermost mesh axis has a part of several ranges of rows.

    FSDP2's placements of matrices that other axes shard too come before another one.
    """
    return isinstance(tensor, DTensor) and is_strided_shard(tensor.placements[-1])


@torch.no_grad()
def with_contiguous_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for a checkpoint; all ranks must call this."""
    return {
        name: _redistribute(cast(DTensor, tensor), Shard(0)) if has_strided_rows(tensor) else tensor
        for name, tensor in tensors.items()
    }


def allocate_contiguous_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers for the tensors of which a checkpoint cannot fill the local shards, by name."""
    return {name: _empty_rows(it) for name, it in tensors.items() if has_strided_rows(it)}


@torch.no_grad()
def copy_strided_rows(tensor: Tensor, rows: Tensor) -> None:
    """Copy a buffer of ``allocate_contiguous_rows`` to its tensor; all ranks must call this."""
    strided = _redistribute(cast(DTensor, rows), cast(DTensor, tensor).placements[-1])
    cast(DTensor, tensor).to_local().copy_(strided.to_local())


def _empty_rows(tensor: Tensor) -> DTensor:
    """Tensor like ``tensor`` whose innermost mesh axis has contiguous rows, as many as before."""
    strided = cast(DTensor, tensor)
    return DTensor.from_local(
        torch.empty_like(strided.to_local()),
        strided.device_mesh,
        (*strided.placements[:-1], Shard(0)),
        run_check=False,
        shape=strided.shape,
        stride=strided.stride(),
    )


def _redistribute(tensor: DTensor, innermost: Placement) -> DTensor:
    """Copy with another placement on the innermost mesh axis, on the same device."""
    outer = tensor.placements[:-1]
    # The mesh's process group cannot gather a shard that is offloaded to the CPU.
    on_device = cast(DTensor, tensor.detach().to(tensor.device_mesh.device_type))
    gathered = on_device.redistribute(placements=(*outer, Replicate()))
    sharded = gathered.redistribute(placements=(*outer, innermost))
    return cast(DTensor, sharded.to(tensor.device))
