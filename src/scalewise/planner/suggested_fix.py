"""The smallest change that makes a run fit, found by trying changes and pairs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from scalewise.activation_checkpointing import FixedCheckpointing, Recompute
from scalewise.hardware import DeviceKind
from scalewise.optimizers import AdamWConfig
from scalewise.parallelism.base import ParallelismConfig
from scalewise.parallelism.ddp import DDPConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.parallelism.single import SingleConfig
from scalewise.planner.fit_check import FitReport, check_fit
from scalewise.precision import FloatFormat, Precision
from scalewise.torch_compile import CompileScope

if TYPE_CHECKING:
    from scalewise.run_config import RunConfig

SHARDS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of ranks that are tried where the profile does not say how many there are."""
CHUNK = 1024
"""Tokens of a piece of the loss."""
TOGETHER = 3
"""Changes that are tried at once, at the most."""


@dataclass(frozen=True)
class RunChange:
    """One change of a run: what a user would type, what it costs, and what it does.

    ``cost``: how much a user gives up, to compare changes by: time a little, another layout more,
    another training most. ``kinds``: of two changes of one kind only one can be made.
    """

    override_text: str
    cost: float
    kinds: frozenset[str]
    apply: Callable[[RunConfig], RunConfig]


@dataclass(frozen=True)
class SuggestedFix:
    """Changes under which a run fits."""

    changes: tuple[RunChange, ...]
    run: RunConfig
    fit: FitReport

    @property
    def override_text(self) -> str:
        """Returns what changes on the command line."""
        return " ".join(change.override_text for change in self.changes)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns the same, override by override."""
        return tuple(self.override_text.split())


FitCheck = Callable[["RunConfig"], FitReport | None]
"""How a run stands against its hardware; None: that cannot be told."""


def suggest_fix(run: RunConfig, check: FitCheck = check_fit) -> SuggestedFix | None:
    """Returns the cheapest changes under which ``run`` fits its hardware; None: none were found."""
    return next(suggest_fixes(run, check), None)


def suggest_fixes(
    run: RunConfig, check: FitCheck = check_fit, max_changes: int = TOGETHER
) -> Iterator[SuggestedFix]:
    """Yields the changes under which ``run`` fits, the cheapest first, so many at once at most."""
    tried = list(memory_saving_changes(run))
    bundles = [
        bundle
        for count in range(1, max_changes + 1)
        for bundle in combinations(tried, count)
        if len(frozenset().union(*(change.kinds for change in bundle)))
        == sum(len(change.kinds) for change in bundle)
    ]
    for bundle in sorted(bundles, key=lambda bundle: sum(change.cost for change in bundle)):
        changed = run
        for change in bundle:
            changed = change.apply(changed)
        if any(changed.validate()):
            continue
        if (fit := check(changed)) is not None and fit.status.is_acceptable:
            yield SuggestedFix(bundle, changed, fit)


def memory_saving_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yields the changes that may save memory, whatever they cost."""
    yield from micro_batch_changes(run)
    yield from _memory_changes(run)
    yield from _layout_changes(run)
    yield from _optimizer_changes(run)
    yield from precision_changes(run)


def precision_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yields the mixed precision that the device has."""
    if run.precision.parameters is FloatFormat.fp32 and run.precision.compute is FloatFormat.fp32:
        lacks = run.hardware.device is DeviceKind.cuda and run.hardware.bf16_tflops == 0
        number = FloatFormat.fp16 if lacks else FloatFormat.bf16
        line, mixed = f"precision={number}_mixed", Precision(compute=number)
        yield RunChange(line, 6, frozenset({"precision"}), _with_changes(precision=mixed))


def micro_batch_changes(run: RunConfig) -> Iterator[RunChange]:
    """Yields smaller micro batches, which keep the rows of a step."""
    size, cost = run.micro_batch // 2, 1.0
    rows = run.global_batch
    while size >= 1:
        trainer = replace(run.trainer, micro_batch=size, global_batch=rows)
        line = f"trainer.micro_batch={size}"
        if run.trainer.global_batch is None:
            line += f" trainer.global_batch={rows}"
        yield RunChange(line, cost, frozenset({"passes"}), _with_changes(trainer=trainer))
        size, cost = size // 2, cost + 0.5


def _memory_changes(run: RunConfig) -> Iterator[RunChange]:
    costs = {Recompute.selective: 2.0, Recompute.full: 3.0}
    order = list(Recompute)
    least = min(map(order.index, run.memory.count_by_recompute(run.model.layers)))
    for recompute, cost in costs.items():
        if order.index(recompute) > least:
            memory = FixedCheckpointing(recompute)
            line = f"memory=checkpoint_{recompute}"
            yield RunChange(line, cost, frozenset({"memory"}), _with_changes(memory=memory))
    if not run.memory.offload and run.compile.scope is CompileScope.none:
        memory = FixedCheckpointing(Recompute.full, offload=True)
        line = "memory=offload_activations"
        yield RunChange(line, 5, frozenset({"memory"}), _with_changes(memory=memory))
    if run.checkpoint.background:
        kept = replace(run.checkpoint, background=False)
        line = "checkpoint.background=false"
        yield RunChange(line, 0.5, frozenset({"checkpoint"}), _with_changes(checkpoint=kept))
    if run.objective.loss_chunk is None:
        objective = replace(run.objective, loss_chunk=CHUNK)
        line = f"objective.loss_chunk={CHUNK}"
        yield RunChange(line, 1.5, frozenset({"loss"}), _with_changes(objective=objective))


def _layout_changes(run: RunConfig) -> Iterator[RunChange]:
    held, most, rows = run.parallelism, run.hardware.total_devices, run.global_batch
    if isinstance(held, SingleConfig | DDPConfig | MeshConfig):
        shards = held.sizes["shards"] if isinstance(held, MeshConfig) else 1
        others = held.world_size // shards if isinstance(held, MeshConfig) else 1
        tried = [size for size in SHARDS if size > shards]
        if isinstance(
            held, DDPConfig
        ):  # as many ranks as were asked for, before fewer or more of them
            tried.sort(key=lambda size: abs(size - held.world_size))
        for step, size in enumerate(tried):
            layout: ParallelismConfig = MeshConfig(shards=size)
            line, kinds = f"parallelism=fsdp parallelism.shards={size}", frozenset({"layout"})
            if isinstance(held, MeshConfig):
                layout, line = replace(held, shards=size), f"parallelism.shards={size}"
            least, trainer = rows // layout.data_parallel_size, run.trainer
            if least < 1 or (most is not None and size * others > most):
                continue
            parts: dict[str, Any] = {"parallelism": layout}
            if least < run.micro_batch:  # more ranks than rows for them
                parts["trainer"] = replace(trainer, micro_batch=least, global_batch=rows)
                line += f" trainer.micro_batch={least} trainer.global_batch={rows}"
                kinds |= {"passes"}
            elif trainer.global_batch is None:
                parts["trainer"] = replace(trainer, global_batch=rows)
                line += f" trainer.global_batch={rows}"
                kinds |= {"passes"}
            yield RunChange(line, 4 + step, kinds, _with_changes(**parts))
    if isinstance(held, MeshConfig) and held.cpu_offload:
        layout = replace(held, cpu_offload=False)
        kinds = frozenset({"layout"})
        yield RunChange(
            "parallelism.cpu_offload=false", 0.5, kinds, _with_changes(parallelism=layout)
        )
    if isinstance(held, MeshConfig) and not held.cpu_offload and held.sizes["shards"] > 1:
        layout = replace(held, cpu_offload=True)
        kinds = frozenset({"layout"})
        yield RunChange("parallelism.cpu_offload=true", 8, kinds, _with_changes(parallelism=layout))


def _optimizer_changes(run: RunConfig) -> Iterator[RunChange]:
    apart = run.parallelism.supports_optimizer_offload and run.hardware.device is DeviceKind.cuda
    if apart and isinstance(run.optimizer, AdamWConfig) and not run.optimizer.offload:
        optimizer, kinds = replace(run.optimizer, offload=True), frozenset({"optimizer"})
        yield RunChange("optimizer.offload=true", 7, kinds, _with_changes(optimizer=optimizer))


def _with_changes(**changed_groups: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda run: replace(run, **changed_groups)
