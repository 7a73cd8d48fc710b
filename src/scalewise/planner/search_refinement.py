"""Single changes of the best candidates of a search, of options that its first stage keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd
from typing import Any

from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.op_graph import Recompute
from scalewise.optimizers import AdamWConfig
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    PagedAdamWConfig,
)
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.deepspeed import DeepSpeedConfig, OffloadTarget
from scalewise.parallelism.mesh import MeshConfig, PipelineSchedule, ShardedState
from scalewise.planner.fit_check import checkpointing_overrides
from scalewise.planner.suggested_fix import LOSS_CHUNK_TOKENS
from scalewise.precision import Float8, FloatFormat
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope

CHECKPOINTING = (
    FixedCheckpointing(Recompute.selective, 2),
    FixedCheckpointing(Recompute.full, 2),
    FixedCheckpointing(Recompute.full, 2, Recompute.selective),
    FixedCheckpointing(Recompute.full, offload=True),
)
"""Recomputation of every second block, and offload of block inputs."""

DEEPSPEED = {
    "deepspeed_zero1": DeepSpeedConfig(stage=1),
    "deepspeed_zero2": DeepSpeedConfig(stage=2),
    "deepspeed_zero3": DeepSpeedConfig(stage=3),
    "deepspeed_zero2_offload": DeepSpeedConfig(stage=2, offload_optimizer=OffloadTarget.cpu),
    "deepspeed_zero3_offload": DeepSpeedConfig(
        stage=3, offload_optimizer=OffloadTarget.cpu, offload_parameters=OffloadTarget.cpu
    ),
}
"""Options of DeepSpeed that replace a data-parallel layout."""
LOW_PRECISION_OPTIMIZERS = {
    "adamw_8bit": AdamW8bitConfig(),
    "adamw_4bit": AdamW4bitConfig(),
    "adafactor": AdafactorConfig(),
}
"""Optimizers with less state than AdamW, which change the training result."""


@dataclass(frozen=True)
class Refinement:
    """One change of a run."""

    overrides: tuple[str, ...]
    """Overrides of the change."""
    groups: Mapping[str, Any]
    """Config groups that the overrides select."""
    changes_training: bool = False
    """Whether the change alters the training result or its precision."""


def iter_refinements(run: RunConfig, fixed_keys: frozenset[str]) -> Iterator[Refinement]:
    """Yield the changes of a run that leave its devices and its micro-batch size."""
    groups = {key.split(".")[0] for key in fixed_keys}
    yield from _mesh_refinements(run.parallelism, run.model, fixed_keys)
    if "parallelism" not in groups:
        yield from _deepspeed_refinements(run.parallelism)
    if "compile" not in groups and run.hardware.device is DeviceKind.cuda:
        for scope in (CompileScope.none, CompileScope.block):
            if scope is not run.applied_compile.scope:
                changed = replace(run.compile, scope=scope)
                yield Refinement((f"compile={scope}",), {"compile": changed})
    if "objective.loss_chunk" not in fixed_keys and run.objective.loss_chunk is None:
        objective = replace(run.objective, loss_chunk=LOSS_CHUNK_TOKENS)
        overrides = (f"objective.loss_chunk={LOSS_CHUNK_TOKENS}",)
        yield Refinement(overrides, {"objective": objective})
    if "memory" not in groups:
        for memory in CHECKPOINTING:
            if memory != run.memory:
                yield Refinement(checkpointing_overrides(memory), {"memory": memory})
    if "optimizer" not in groups and isinstance(run.optimizer, AdamWConfig):
        yield from _optimizer_refinements(run.optimizer)
    precision = run.precision
    is_mixed = (precision.parameters, precision.compute) == (FloatFormat.fp32, FloatFormat.bf16)
    if "precision" not in groups and run.hardware.fp8_tflops and is_mixed:
        yield Refinement(("precision=fp8",), {"precision": Float8()}, changes_training=True)


def _mesh_refinements(
    layout: object, model: ModelConfig, fixed_keys: frozenset[str]
) -> Iterator[Refinement]:
    if not isinstance(layout, MeshConfig):
        return
    changes: list[dict[str, Any]] = []
    if layout.sizes["pipeline"] > 1:
        changes += [_schedule_change(layout, schedule) for schedule in PipelineSchedule]
    if layout.parameter_shards > 1:
        changes += [{"shard": state} for state in ShardedState]
        changes += [{"cpu_offload": not layout.cpu_offload}]
    if isinstance(model, DecoderConfig) and model.experts:
        common = gcd(layout.parameter_shards, model.experts)
        changes += [{"expert": ranks} for ranks in range(1, common + 1) if common % ranks == 0]
    for change in changes:
        changed = replace(layout, **change)
        if changed != layout and not fixed_keys & {f"parallelism.{name}" for name in change}:
            overrides = (f"parallelism.{name}={_text(value)}" for name, value in change.items())
            yield Refinement(tuple(overrides), {"parallelism": changed})


def _deepspeed_refinements(layout: ParallelismConfig) -> Iterator[Refinement]:
    """Yield ZeRO on the same devices, for layouts whose ranks all read different samples."""
    ranks = layout.world_size
    is_data_parallel = isinstance(layout, MeshConfig | DDPConfig)
    if ranks == 1 or not is_data_parallel or layout.data_parallel_size != ranks:
        return
    for name, config in DEEPSPEED.items():
        overrides = (f"parallelism={name}", f"parallelism.replicas={ranks}")
        yield Refinement(overrides, {"parallelism": replace(config, replicas=ranks)})


def _schedule_change(layout: MeshConfig, schedule: PipelineSchedule) -> dict[str, Any]:
    """Return fields of a mesh with this schedule, with a micro-batch for each of its stages."""
    num_stages = replace(layout, pipeline_schedule=schedule).num_stages
    change: dict[str, Any] = {"pipeline_schedule": schedule}
    if num_stages > layout.num_pipeline_micro_batches:
        change["pipeline_micro_batches"] = num_stages
    return change


def _text(value: Enum | bool | int) -> str:
    return value.name if isinstance(value, Enum) else str(value).lower()


def _optimizer_refinements(optimizer: AdamWConfig) -> Iterator[Refinement]:
    if not optimizer.offload:
        offloaded = replace(optimizer, offload=True)
        yield Refinement(("optimizer.offload=true",), {"optimizer": offloaded})
    if not optimizer.in_backward:
        in_backward = replace(optimizer, in_backward=True)
        yield Refinement(("optimizer.in_backward=true",), {"optimizer": in_backward})
    yield Refinement(("optimizer=adamw_paged",), {"optimizer": PagedAdamWConfig()})
    for name, changed in LOW_PRECISION_OPTIMIZERS.items():
        yield Refinement((f"optimizer={name}",), {"optimizer": changed}, changes_training=True)
