"""Placements of the matrices of experts over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from scalewise.checkpoints.strided_shards import has_strided_rows
from scalewise.compat.torch_distributed import clear_sharding_caches, init_fake_process_group
from scalewise.models.base import TPStyle
from scalewise.models.decoder.moe import ExpertMatrices
from scalewise.strategies.tensor_parallel_experts import ShardedExperts, fsdp_shard_dim

EXPERTS, ROWS, COLUMNS = 4, 6, 10


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    init_fake_process_group(request.param, 4)
    yield request.param
    dist.destroy_process_group()
    clear_sharding_caches()


@pytest.fixture
def mesh(rank: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))


def sharded_matrices(mesh: DeviceMesh, *, column: bool) -> tuple[torch.Tensor, ExpertMatrices]:
    """Matrices of all experts, ``weight_EOI``, and the module that stores a part of them."""
    matrices = ExpertMatrices(EXPERTS, ROWS, COLUMNS)
    numbers = torch.arange(EXPERTS * ROWS * COLUMNS, dtype=torch.float32)
    matrices.weight = nn.Parameter(numbers.view(EXPERTS * ROWS, COLUMNS))
    style = ShardedExperts(TPStyle.expert_column if column else TPStyle.expert_row, mesh)
    parallelize_module(matrices, mesh["tensor"], style)
    return numbers.view(EXPERTS, ROWS, COLUMNS), matrices


@pytest.mark.parametrize("column", [True, False])
def test_each_rank_stores_some_features_of_some_experts(
    mesh: DeviceMesh, rank: int, column: bool
) -> None:
    weight_EOI, matrices = sharded_matrices(mesh, column=column)
    expert, tensor = divmod(rank, 2)
    some_experts = weight_EOI.chunk(2)[expert]
    expected = some_experts.chunk(2, dim=1 if column else 2)[tensor]
    assert isinstance(matrices.weight, DTensor)
    assert matrices.weight.shape == (EXPERTS * ROWS, COLUMNS)
    local = matrices.weight.to_local().unflatten(0, (-1, matrices.out_features))
    assert torch.equal(local, expected)


def test_fsdp_shards_columns_where_tensor_ranks_have_rows(mesh: DeviceMesh) -> None:
    shard_dims = []
    for column in (True, False):
        _, matrices = sharded_matrices(mesh, column=column)
        assert has_strided_rows(matrices.weight) is column
        shard_dim = fsdp_shard_dim(matrices.weight)
        shard_dims.append(None if shard_dim is None else shard_dim.dim)
    assert shard_dims == [1, None]


def test_experts_compute_their_rows(mesh: DeviceMesh, rank: int) -> None:
    """Column-parallel matrices of two experts, with one row for the first and two for the other."""
    weight_EOI, matrices = sharded_matrices(mesh, column=True)
    expert, tensor = divmod(rank, 2)
    x = torch.randn(3, COLUMNS)
    first, second = weight_EOI.chunk(2)[expert].chunk(2, dim=1)[tensor]
    y = matrices(x, torch.tensor([1, 3], dtype=torch.int32))
    torch.testing.assert_close(y, torch.cat([x[:1] @ first.T, x[1:] @ second.T]))
