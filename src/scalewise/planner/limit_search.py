"""Limits of a run: the largest micro-batch, longest sequence and fewest devices that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from scalewise.errors import ConfigError
from scalewise.parallelism.mesh import AXES
from scalewise.plan_config import PlanSearch
from scalewise.planner import layout_enumeration
from scalewise.planner.fit_check import FitStatus, RunVariant
from scalewise.planner.plan import Plan
from scalewise.planner.search import search_runs
from scalewise.planner.step_time import predict_step_time
from scalewise.run_config import RunConfig

MAX_MICRO_BATCH = 1 << 16
"""Largest micro-batch that is tried."""
MAX_DEVICES = 1 << 12
"""Largest number of devices that is tried."""
DEVICES_PER_NODE = 8
"""Devices per node where the profile has none."""
SEQUENCE_UNIT = 128
"""Tokens by which sequences differ, times the context-parallel degree."""


@dataclass(frozen=True)
class LimitRow:
    """Plan of one value of the varied quantity."""

    value: str
    """The value."""
    plan: Plan
    """Plan of the run with it."""

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.plan.fit.status is FitStatus.fits


def limit_rows(run: RunConfig) -> list[LimitRow]:
    """Return the values that were tried, in increasing order.

    Raises:
        ConfigError: The memory of the model is predicted by a trace only.
    """
    search = run.plan.search
    if run.objective.trace_only:
        reason = "requires a model whose memory is predicted without a trace"
        raise ConfigError.for_key("plan.search", search.value, reason, "set plan.search=none")
    if search is PlanSearch.devices:
        return _device_rows(run)
    vary: Callable[[RunConfig, int], RunVariant]
    if search is PlanSearch.micro_batch:
        unit, limit, vary = _micro_batch_unit(run), MAX_MICRO_BATCH, _with_micro_batch
    else:
        context = run.model.context
        unit, limit, vary = min(_sequence_unit(run), context), context, _with_sequence
    plans = _try_counts(lambda count: vary(run, count * unit), limit // unit)
    return [LimitRow(f"{count * unit}", plan) for count, plan in sorted(plans.items())]


def _micro_batch_unit(run: RunConfig) -> int:
    layout = run.parallelism
    if not layout_enumeration.is_pipeline(layout):
        return 1
    return layout.num_pipeline_micro_batches


def _sequence_unit(run: RunConfig) -> int:
    sizes = zip(AXES, layout_enumeration.axis_sizes(run.parallelism), strict=True)
    return SEQUENCE_UNIT * dict(sizes)["context"]


def _with_micro_batch(run: RunConfig, size: int) -> RunVariant:
    global_batch = size * run.parallelism.data_parallel_size
    trainer = replace(run.trainer, micro_batch=size, global_batch=global_batch, batch_warmup={})
    overrides = (f"trainer.micro_batch={size}", f"trainer.global_batch={global_batch}")
    return RunVariant(run).change(*overrides, trainer=trainer)


def _with_sequence(run: RunConfig, tokens: int) -> RunVariant:
    fields: Any = run.data
    data: Any = replace(fields, sequence=tokens)
    trainer = replace(run.trainer, sequence_warmup={})
    return RunVariant(run).change(f"data.sequence={tokens}", data=data, trainer=trainer)


def _try_counts(vary: Callable[[int], RunVariant], limit: int) -> dict[int, Plan]:
    """Plan counts by doubling until one does not fit, then by bisection."""
    plans: dict[int, Plan] = {}

    def fits(count: int) -> bool:
        variant = vary(count)
        step_time = predict_step_time(variant.run)
        plans[count] = Plan(variant.run, variant.fit, step_time, variant.overrides)
        return variant.fit.status is FitStatus.fits

    low, high = 0, 1
    while high < limit and fits(high):
        low, high = high, 2 * high
    if high >= limit:
        high = limit + 1
        if limit > low and fits(limit):
            return plans
    while high - low > 1:
        middle = (low + high) // 2
        if middle in plans or fits(middle):
            low = middle
        else:
            high = middle
    return plans


def _device_rows(run: RunConfig) -> list[LimitRow]:
    """Return the best layout on 1, 2, 4, ... devices, up to one doubling after the first fit."""
    rows: list[LimitRow] = []
    count = 1
    while count <= MAX_DEVICES and sum(row.fits for row in rows) < 2:
        per_node = min(run.hardware.devices_per_node or DEVICES_PER_NODE, count)
        hardware = replace(run.hardware, devices_per_node=per_node, nodes=count // per_node)
        result = search_runs(replace(run, hardware=hardware))
        plan: Plan | None = result.best
        if plan is None and result.candidates:
            plan = min(result.candidates, key=lambda it: it.fit.breakdown.peak)
        if plan is not None:
            rows.append(LimitRow(str(count), plan))
        count *= 2
    return rows
