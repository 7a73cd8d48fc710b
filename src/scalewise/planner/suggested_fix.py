"""Suggested fix: the cheapest change, or combination of changes, that makes a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig, ShardedState
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.fit_check import FitReport, RunVariant, check_fit, checkpointing_overrides
from scalewise.precision import FloatFormat, Precision
from scalewise.run_config import RunConfig
from scalewise.torch_compile import CompileScope

SHARD_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Sharding sizes to try."""
LOSS_CHUNK_TOKENS = 1024
"""Chunk size of a chunked loss, in tokens."""
MAX_CHANGES = 3
"""Maximum number of combined changes."""


@dataclass(frozen=True)
class RunChange:
    """One change of a run."""

    overrides: tuple[str, ...]
    """Overrides of the change."""
    groups: Mapping[str, Any]
    """Config groups that the overrides select."""
    cost: float
    """Relative cost: low for time, higher for another strategy, highest for another training."""
    kinds: frozenset[str]
    """Kinds of the change; combined changes have distinct kinds."""

    def apply(self, variant: RunVariant) -> RunVariant:
        """Variant with this change."""
        return variant.change(*self.overrides, **self.groups)


@dataclass(frozen=True)
class SuggestedFix:
    """Changes with which a run fits."""

    changes: tuple[RunChange, ...]
    """The changes."""
    run: RunConfig
    """The changed run."""
    overrides: tuple[str, ...]
    """Overrides of all changes."""
    fit: FitReport
    """Fit of the changed run."""

    @property
    def override_text(self) -> str:
        """Overrides of all changes, separated by spaces."""
        return " ".join(self.overrides)


FitCheck = Callable[["RunConfig"], FitReport | None]
"""Function that compares a run with its hardware; None if it cannot be planned."""


def suggest_fix(run: RunConfig, check: FitCheck = check_fit) -> SuggestedFix | None:
    """Return the cheapest changes with which ``run`` fits; None if no combination helps."""
    return next(suggest_fixes(run, check), None)


def suggest_fixes(
    run: RunConfig, check: FitCheck = check_fit, max_changes: int = MAX_CHANGES
) -> Iterator[SuggestedFix]:
    """Yield combinations of changes with which ``run`` fits, cheapest first."""
    candidates = list(memory_saving_changes(run))
    combinations_to_try = [
        combination
        for count in range(1, max_changes + 1)
        for combination in combinations(candidates, count)
        if len(frozenset().union(*(change.kinds for change in combination)))
        == sum(len(change.kinds) for change in combination)
    ]
    for combination in sorted(
        combinations_to_try, key=lambda combination: sum(change.cost for change in combination)
    ):
        variant = RunVariant(run)
        for change in combination:
            variant = change.apply(variant)
        if not variant.is_valid:
            continue
        if (fit := check(variant.run)) is not None and fit.status.is_acceptable:
            yield SuggestedFix(combination, variant.run, variant.overrides, fit)


def memory_saving_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yield all changes that may save memory."""
    yield from micro_batch_changes(run)
    yield from _memory_changes(run)
    yield from _layout_changes(run)
    yield from _optimizer_changes(run)
    yield from precision_changes(run)


def precision_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yield mixed precision in the format that the device supports."""
    if run.precision.parameters is FloatFormat.fp32 and run.precision.compute is FloatFormat.fp32:
        lacks = run.hardware.device is DeviceKind.cuda and run.hardware.bf16_tflops == 0
        compute = FloatFormat.fp16 if lacks else FloatFormat.bf16
        yield RunChange(
            (f"precision={compute}_mixed",),
            {"precision": Precision(compute=compute)},
            6,
            frozenset({"precision"}),
        )


def micro_batch_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yield smaller micro-batches with the same global batch."""
    size, cost = run.micro_batch // 2, 1.0
    global_batch = run.global_batch
    while size >= 1:
        trainer = replace(run.trainer, micro_batch=size, global_batch=global_batch)
        overrides: tuple[str, ...] = (f"trainer.micro_batch={size}",)
        if run.trainer.global_batch is None:
            overrides += (f"trainer.global_batch={global_batch}",)
        yield RunChange(overrides, {"trainer": trainer}, cost, frozenset({"passes"}))
        size, cost = size // 2, cost + 0.5


def _memory_changes(run: RunConfig) -> Iterator[RunChange]:
    costs = {Recompute.selective: 2.0, Recompute.full: 3.0}
    order = list(Recompute)
    lowest_index = min(map(order.index, run.memory.count_by_recompute(run.model.layers)))
    for recompute, cost in costs.items():
        if order.index(recompute) > lowest_index:
            yield _checkpointing_change(FixedCheckpointing(recompute), cost)
    if not run.memory.offload and run.compile.scope in (CompileScope.auto, CompileScope.none):
        yield _checkpointing_change(FixedCheckpointing(Recompute.full, offload=True), 5)
    if run.checkpoint.background:
        checkpoint = replace(run.checkpoint, background=False)
        overrides = ("checkpoint.background=false",)
        yield RunChange(overrides, {"checkpoint": checkpoint}, 0.5, frozenset({"checkpoint"}))
    if run.objective.loss_chunk is None:
        objective = replace(run.objective, loss_chunk=LOSS_CHUNK_TOKENS)
        overrides = (f"objective.loss_chunk={LOSS_CHUNK_TOKENS}",)
        yield RunChange(overrides, {"objective": objective}, 1.5, frozenset({"loss"}))


def _checkpointing_change(memory: FixedCheckpointing, cost: float) -> RunChange:
    overrides = checkpointing_overrides(memory)
    return RunChange(overrides, {"memory": memory}, cost, frozenset({"memory"}))


def _layout_changes(run: RunConfig) -> Iterator[RunChange]:
    strategy, total_devices, global_batch = (
        run.parallelism,
        run.hardware.total_devices,
        run.global_batch,
    )
    if isinstance(strategy, SingleConfig | DDPConfig | MeshConfig):
        shards = strategy.sizes["shards"] if isinstance(strategy, MeshConfig) else 1
        other_ranks = strategy.world_size // shards if isinstance(strategy, MeshConfig) else 1
        shard_counts = [size for size in SHARD_COUNTS if size > shards]
        if isinstance(strategy, DDPConfig):  # try the requested number of ranks first
            shard_counts.sort(key=lambda size: abs(size - strategy.world_size))
        for index, size in enumerate(shard_counts):
            layout: ParallelismConfig = MeshConfig(shards=size)
            kinds = frozenset({"layout"})
            overrides: tuple[str, ...] = ("parallelism=fsdp", f"parallelism.shards={size}")
            if isinstance(strategy, MeshConfig):
                layout, overrides = replace(strategy, shards=size), overrides[1:]
            micro_batch, trainer = global_batch // layout.data_parallel_size, run.trainer
            if micro_batch < 1 or (
                total_devices is not None and size * other_ranks > total_devices
            ):
                continue
            changed_groups: dict[str, Any] = {"parallelism": layout}
            if micro_batch < run.micro_batch:  # more ranks than micro-batches of this size
                changed_groups["trainer"] = replace(
                    trainer, micro_batch=micro_batch, global_batch=global_batch
                )
                overrides += (f"trainer.micro_batch={micro_batch}",)
                overrides += (f"trainer.global_batch={global_batch}",)
                kinds |= {"passes"}
            elif trainer.global_batch is None:
                changed_groups["trainer"] = replace(trainer, global_batch=global_batch)
                overrides += (f"trainer.global_batch={global_batch}",)
                kinds |= {"passes"}
            yield RunChange(overrides, changed_groups, 4 + index, kinds)
    if isinstance(strategy, MeshConfig) and strategy.gathers_once:
        groups = {"parallelism": replace(strategy, shard=ShardedState.parameters)}
        yield RunChange(("parallelism.shard=parameters",), groups, 1, frozenset({"layout"}))
    if isinstance(strategy, MeshConfig) and (strategy.cpu_offload or strategy.sizes["shards"] > 1):
        cpu_offload = not strategy.cpu_offload
        overrides = (f"parallelism.cpu_offload={str(cpu_offload).lower()}",)
        groups = {"parallelism": replace(strategy, cpu_offload=cpu_offload)}
        yield RunChange(overrides, groups, 8 if cpu_offload else 0.5, frozenset({"layout"}))


def _optimizer_changes(run: RunConfig) -> Iterator[RunChange]:
    can_offload = (
        run.parallelism.supports_optimizer_offload and run.hardware.device is DeviceKind.cuda
    )
    if can_offload and isinstance(run.optimizer, AdamWConfig) and not run.optimizer.offload:
        optimizer = replace(run.optimizer, offload=True)
        overrides = ("optimizer.offload=true",)
        yield RunChange(overrides, {"optimizer": optimizer}, 7, frozenset({"optimizer"}))
