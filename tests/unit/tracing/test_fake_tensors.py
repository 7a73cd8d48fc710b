"""Fake tensors and fake ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scalewise.compat.torch import unset_fake_temporarily
from scalewise.parallelism.mesh import MeshConfig
from scalewise.tracing.fake_tensors import (
    FakeStageChannel,
    ReadableScalars,
    fake_ranks,
    fake_tensor_mode,
)


def test_readable_scalars_answer_for_fake_tensors_only() -> None:
    real = torch.tensor([3, 7])
    with ReadableScalars():
        assert real[1].item() == 7
        with fake_tensor_mode():
            assert torch.tensor([3, 7])[1].item() == 0
            assert torch.zeros(()).item() == 1.0
            assert torch.zeros((), dtype=torch.bool).item() is True


def test_mesh_axes_of_a_fake_rank_contain_the_rank() -> None:
    with fake_ranks(MeshConfig(pipeline=2, shards=4), 6, FakeStageChannel()):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pipeline", "shards"))
        with fake_tensor_mode(), ReadableScalars():
            axes = {name: mesh[name] for name in ("pipeline", "shards")}
            with unset_fake_temporarily():
                ranks = {name: axis.mesh for name, axis in axes.items()}
    assert {name: axis_ranks.tolist() for name, axis_ranks in ranks.items()} == {
        "pipeline": [2, 6],
        "shards": [4, 5, 6, 7],
    }
    assert not dist.is_initialized()
