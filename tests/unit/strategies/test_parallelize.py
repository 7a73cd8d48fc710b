"""FSDP of user modules: what torch warns of is not silenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scalewise.compat.torch_distributed import init_fake_process_group
from scalewise.parallelism.mesh import MeshConfig
from scalewise.run_config import RunConfig
from scalewise.strategies.parallelize import shard_user_module


class ViewModule(LightningModule):
    """Module whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output.view(-1)


class OneRankMesh:
    """Mesh of one CPU rank."""

    root_device = torch.device("cpu")
    expert_mesh = None

    def __init__(self, spec: MeshConfig) -> None:
        self.spec = spec
        self.device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_fake_process_group(0, 1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fsdp_warns_of_views_that_a_user_module_returns(
    compose: Callable[..., RunConfig],
) -> None:
    run = compose("parallelism=fsdp", "parallelism.shards=2", check_machine=False)
    module, mesh = ViewModule(), cast(Any, OneRankMesh(cast(MeshConfig, run.parallelism)))

    def shard_and_run() -> None:  # all of it, because pytest.warns ignores earlier filters
        shard_user_module(module, run, mesh)
        module(torch.ones(1, 4))

    with pytest.warns(UserWarning, match="returned a view tensor"):
        shard_and_run()
