"""Plans of decoders with dense blocks before those with experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scalewise.hardware import DeviceKind
from scalewise.parallelism.mesh import MeshConfig
from scalewise.planner.rank_memory import rank_memory_of
from scalewise.run_config import RunConfig
from scalewise.strategies.single import SingleDevice

Compose = Callable[..., RunConfig]
DENSE_FIRST = (
    *("model=moe_nano", "model.layers=4", "model.dense_layers=1", "model.tied=false"),
    "data=synthetic",
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipeline_ranks_together_store_each_weight_once(compose: Compose, ranks: int) -> None:
    run = compose(*DENSE_FIRST, "parallelism=pipeline", f"parallelism.pipeline={ranks}")
    sizes = [rank_memory_of(run, rank).numel(1) for rank in range(ranks)]
    whole = rank_memory_of(compose(*DENSE_FIRST)).numel(1)
    assert sum(sizes) == whole
    assert max(sizes) < whole


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}])
@pytest.mark.parametrize("dense_layers", [0, 1])
def test_mesh_ranks_together_store_each_weight_once(
    compose: Compose, dense_layers: int, axes: dict[str, int]
) -> None:
    overrides = (*DENSE_FIRST, f"model.dense_layers={dense_layers}")
    sizes = (f"parallelism.{axis}={size}" for axis, size in axes.items())
    run = compose(*overrides, "parallelism=mesh", "parallelism.shards=4", *sizes)
    assert isinstance(run.parallelism, MeshConfig)
    stored = rank_memory_of(run).numel(run.parallelism.parameter_shards) * run.world_size
    whole, tensor_ranks = rank_memory_of(compose(*overrides)).numel(1), axes.get("tensor", 1)
    replicated = sum(it.numel for it in run.weight_census() if it.role in ("norm", "router"))
    assert stored == whole + (tensor_ranks - 1) * replicated


@pytest.mark.parametrize(
    "targets", ["feedforward.experts.*", ".*", "feedforward.up,attention.*"], ids=str
)
def test_adapted_weights_are_those_of_the_module(compose: Compose, targets: str) -> None:
    run = compose(*DENSE_FIRST, "adapter=lora", f"adapter.targets=[{targets}]")
    module = SingleDevice(DeviceKind.cpu).build(run)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert run.trainable_parameters == sum(parameter.numel() for parameter in trained) > 0
