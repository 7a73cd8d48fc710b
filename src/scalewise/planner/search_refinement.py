"""Single changes of the best candidates of a search, of options that its first stage keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd
from typing import Any

from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import ModelConfig
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.op_graph import Recompute
from scalewise.optimizers import AdamWConfig
from scalewise.optimizers.config import AdafactorConfig, AdamW8bitConfig, PagedAdamWConfig
from scalewise.parallelism.mesh import MeshConfig, PipelineSchedule, ShardedState
from scalewise.planner.fit_check import checkpointing_overrides
from scalewise.precision import Float8, FloatFormat
from scalewise.run_config import RunConfig

CHECKPOINTING = (
    FixedCheckpointing(Recompute.selective, 2),
    FixedCheckpointing(Recompute.full, 2),
    FixedCheckpointing(Recompute.full, 2, Recompute.selective),
    FixedCheckpointing(Recompute.full, offload=True),
)
"""Recomputation of every second block, and offload of block inputs."""


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
    """Yield the changes of a run that leave its layout and its micro-batch size."""
    groups = {key.split(".")[0] for key in fixed_keys}
    yield from _mesh_refinements(run.parallelism, run.model, fixed_keys)
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
    for name, changed in (("adamw_8bit", AdamW8bitConfig()), ("adafactor", AdafactorConfig())):
        yield Refinement((f"optimizer={name}",), {"optimizer": changed}, changes_training=True)
