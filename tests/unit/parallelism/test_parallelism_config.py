"""Parallelism configs: mesh sizes, data ranks, stages and rejections."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from lightning.pytorch import strategies

from scalewise.hardware import DeviceKind
from scalewise.parallelism import ParallelismConfig
from scalewise.parallelism.ddp import CommHook, DDPConfig
from scalewise.parallelism.mesh import AXES, MeshConfig, PipelineSchedule, ShardedState
from scalewise.parallelism.single import SingleConfig
from scalewise.strategies.base import ParallelStrategy
from scalewise.strategies.build import build_strategy

MESHES: list[tuple[MeshConfig, list[int], int]] = [
    (MeshConfig(), [0], 1),
    (MeshConfig(shards=4), [0, 1, 2, 3], 4),
    (MeshConfig(replicate=2, shards=2), [0, 1, 2, 3], 4),
    (MeshConfig(tensor=4), [0, 0, 0, 0], 1),
    (MeshConfig(context=2), [0, 0], 2),
    (MeshConfig(pipeline=4), [0, 0, 0, 0], 1),
    (MeshConfig(shards=2, tensor=2), [0, 0, 1, 1], 2),
    (MeshConfig(pipeline=2, shards=2), [0, 1, 0, 1], 2),
    (MeshConfig(pipeline=2, replicate=2, tensor=2), [0, 0, 1, 1, 0, 0, 1, 1], 2),
    (MeshConfig(replicate=2, shards=2, context=2), [0, 0, 1, 1, 2, 2, 3, 3], 8),
    (MeshConfig(pipeline=2, shards=3, context=2), [0, 0, 1, 1, 2, 2] * 2, 6),
]
"""Meshes, the data-parallel rank of each rank, and the number of ranks that average gradients."""


@pytest.mark.parametrize(
    ("spec", "devices", "sizes"),
    [
        (MeshConfig(shards="auto"), None, {"shards": 2}),
        (MeshConfig(shards="auto"), 8, {"shards": 8}),
        (MeshConfig(shards="auto"), 1, {"shards": 1}),
        (MeshConfig(replicate=2, shards="auto"), 8, {"replicate": 2, "shards": 4}),
        (MeshConfig(replicate=2, shards="auto"), None, {"replicate": 2, "shards": 2}),
        (MeshConfig(pipeline=2, tensor="auto", context=2), 12,
         {"pipeline": 2, "tensor": 3, "context": 2}),
        (MeshConfig(shards=4, tensor="auto"), 2, {"shards": 4, "tensor": 1}),
        (MeshConfig(shards=4), 2, {"shards": 4}),
    ],
)  # fmt: skip
def test_auto_axis_takes_the_remaining_devices(
    spec: MeshConfig, devices: int | None, sizes: dict[str, int]
) -> None:
    resolved = spec.resolve(devices)
    assert resolved.sizes == dict.fromkeys(AXES, 1) | sizes
    assert resolved.world_size == math.prod(sizes.values())
    assert resolved.resolve(devices) == resolved
    assert list(resolved.validate()) == []


@pytest.mark.parametrize(("spec", "expected_ranks", "averaged"), MESHES, ids=repr)
def test_data_parallel_rank_of_each_rank(
    spec: MeshConfig, expected_ranks: list[int], averaged: int
) -> None:
    assert [spec.data_parallel_rank(rank) for rank in range(spec.world_size)] == expected_ranks
    assert set(expected_ranks) == set(range(spec.data_parallel_size))
    assert spec.gradient_averaging_size == averaged


@pytest.mark.parametrize(
    ("spec", "expected_groups"),
    [
        (MeshConfig(context=2), [0, 1]),
        (MeshConfig(tensor=2), [0, 0]),
        (MeshConfig(pipeline=2, shards=2, tensor=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (DDPConfig(replicas=2), [0, 1]),
    ],
    ids=repr,
)
def test_random_seed_group_of_each_rank(
    spec: ParallelismConfig, expected_groups: list[int]
) -> None:
    assert [spec.dropout_rank(rank) for rank in range(spec.world_size)] == expected_groups


def test_replicas_read_different_samples() -> None:
    assert [DDPConfig(replicas=3).data_parallel_rank(rank) for rank in range(3)] == [0, 1, 2]
    assert (
        DDPConfig(replicas=3).gradient_averaging_size
        == DDPConfig(replicas=3).data_parallel_size
        == 3
    )
    assert (SingleConfig().data_parallel_rank(0), SingleConfig().gradient_averaging_size) == (0, 1)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "stages"),
    [("1F1B", None, 3), ("GPipe", None, 3), ("Interleaved1F1B", None, 6),
     ("Interleaved1F1B", 3, 9), ("InterleavedZeroBubble", None, 6), ("ZBVZeroBubble", None, 6)],
)  # fmt: skip
def test_pipeline_stages_and_micro_batches(
    schedule: str, stages_per_rank: int | None, stages: int
) -> None:
    spec = MeshConfig(
        pipeline=3, pipeline_schedule=PipelineSchedule(schedule), stages_per_rank=stages_per_rank
    )
    assert (spec.num_stages, spec.num_pipeline_micro_batches) == (stages, stages)
    assert replace(spec, pipeline_micro_batches=12).num_pipeline_micro_batches == 12
    assert list(spec.validate()) == []


@pytest.mark.parametrize(
    ("spec", "frees_after_forward", "delays_reduction"),
    [
        (MeshConfig(shards=2), True, False),
        (MeshConfig(shards=2, shard=ShardedState.gradients), False, False),
        (MeshConfig(context=2, shard=ShardedState.optimizer), False, True),
        (MeshConfig(shards=2, reshard_after_forward=False), False, False),
        (MeshConfig(shards=2, reduce_each_micro_batch=False), True, True),
        (MeshConfig(pipeline=2, shards=2, reduce_each_micro_batch=False), True, False),
    ],
    ids=repr,
)
def test_sharded_state_determines_gathering_and_reduction(
    spec: MeshConfig, frees_after_forward: bool, delays_reduction: bool
) -> None:
    assert spec.frees_after_forward == frees_after_forward
    assert spec.delays_reduction == delays_reduction
    assert list(spec.validate()) == []


def test_pipeline_schedules_exist_in_torch() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    for schedule in PipelineSchedule:
        assert get_schedule_class(schedule.value).__name__.endswith(schedule.value), schedule


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        (MeshConfig(shards=0), ["shards"]),
        (MeshConfig(shards=-1, tensor=0), ["shards", "tensor"]),
        (MeshConfig(tensor="many"), ["tensor"]),
        (MeshConfig(shards="auto", tensor="auto"), ["tensor"]),
        (MeshConfig(pipeline="auto", shards="auto", tensor="auto"), ["shards", "tensor"]),
        (MeshConfig(prefetch=-1), ["prefetch"]),
        (MeshConfig(shards=2, one_rank_mesh=True), ["one_rank_mesh"]),
        (MeshConfig(replicate=2, shard=ShardedState.optimizer), ["shard"]),
        (MeshConfig(pipeline_micro_batches=0), ["pipeline_micro_batches"]),
        (MeshConfig(stages_per_rank=2), ["stages_per_rank"]),
        (MeshConfig(stages_per_rank=1, pipeline_schedule=PipelineSchedule.interleaved_1f1b),
         ["stages_per_rank"]),
        (MeshConfig(stages_per_rank=3, pipeline_schedule=PipelineSchedule.zbv_zero_bubble),
         ["stages_per_rank"]),
        (DDPConfig(replicas=0), ["replicas"]),
        (DDPConfig(bucket_mib=0.0), ["bucket_mib"]),
        (DDPConfig(bucket_mib=math.nan), ["bucket_mib"]),
        (DDPConfig(powersgd_rank=0, averaging_period=0), ["powersgd_rank", "averaging_period"]),
        (DDPConfig(lossless_steps=-1), ["lossless_steps"]),
        (DDPConfig(comm_hook=CommHook.fp16_powersgd, lossless_steps=1), ["lossless_steps"]),
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_mesh_is_rejected(spec: ParallelismConfig, keys: list[str]) -> None:
    issues = list(spec.validate())
    assert [issue.key for issue in issues] == [f"parallelism.{key}" for key in keys]
    assert all(issue.reason for issue in issues)


@pytest.mark.parametrize(
    "spec",
    [DDPConfig(lossless_steps=0), DDPConfig(comm_hook=CommHook.powersgd, lossless_steps=2),
     DDPConfig(comm_hook=CommHook.post_local_sgd, lossless_steps=0), MeshConfig(prefetch=0)],
    ids=repr,
)  # fmt: skip
def test_mesh_boundary_cases_are_accepted(spec: ParallelismConfig) -> None:
    assert list(spec.validate()) == []


def test_open_mesh_sizes_are_resolved() -> None:
    assert DDPConfig().resolve(4).world_size == 4
    assert DDPConfig(replicas=3).resolve(4).world_size == 3
    assert DDPConfig().world_size == 2
    assert SingleConfig().resolve(8).world_size == SingleConfig().data_parallel_size == 1


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(SingleConfig(), "SingleDeviceStrategy"), (DDPConfig(), "DDPStrategy"),
     (MeshConfig(shards=2), "ModelParallelStrategy"), (MeshConfig(), "SingleDeviceStrategy"),
     (MeshConfig(one_rank_mesh=True), "ModelParallelStrategy")],
)  # fmt: skip
def test_parallelism_configs_build_lightning_strategies(
    spec: ParallelismConfig, expected: str
) -> None:
    strategy = build_strategy(spec, DeviceKind.cpu, timedelta(seconds=7))
    assert isinstance(strategy, ParallelStrategy)
    assert isinstance(strategy, getattr(strategies, expected))
