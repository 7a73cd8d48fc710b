"""``memory=auto``: the least recomputation within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from fixtures.strategies import LLAMA_8B

from scalewise.errors import ConfigError
from scalewise.memory_config import AutoCheckpointing, FixedCheckpointing
from scalewise.models.op_graph import Recompute
from scalewise.planner import peak_memory, step_time
from scalewise.planner.auto_settings import resolve_auto_checkpointing
from scalewise.planner.fit_check import FitStatus, RunVariant, checkpointing_overrides
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig
from scalewise.units import GIB

Compose = Callable[..., RunConfig]
TRAINING = (*LLAMA_8B, "trainer.micro_batch=2")
LARGE_DEVICE = (*TRAINING, "hardware.memory_gib=1000")
PIPELINE_RUN = (
    *(override for override in LARGE_DEVICE if not override.startswith("parallelism")),
    "parallelism=pipeline",
    "parallelism.pipeline=4",
    "trainer.micro_batch=8",
)
ZERO_BUBBLE = (*PIPELINE_RUN, "parallelism.pipeline_schedule=interleaved_zero_bubble")


def all_mixtures(run: RunConfig) -> Iterator[RunConfig]:
    """All mixtures of two recomputation kinds, by number of blocks."""
    layers = run.model.layers
    for other_recompute, recompute in combinations(Recompute, 2):
        for count in range(1, layers + 1):
            checkpointing = FixedCheckpointing(recompute, round(layers / count, 4), other_recompute)
            yield replace(run, memory=checkpointing)


def checkpointing_extremes(run: RunConfig) -> tuple[int, int]:
    no_checkpointing = replace(run, memory=FixedCheckpointing())
    full_checkpointing = replace(run, memory=FixedCheckpointing(Recompute.full))
    return peak_memory.worst_rank_breakdown(
        full_checkpointing
    ).peak, peak_memory.worst_rank_breakdown(no_checkpointing).peak


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("overrides", [LARGE_DEVICE, PIPELINE_RUN], ids=["fsdp", "pipeline"])
def test_auto_checkpointing_is_optimal_within_the_budget(
    overrides: tuple[str, ...], fraction: float, compose: Compose
) -> None:
    run = compose(*overrides, "memory=auto", check_machine=False)
    low, high = checkpointing_extremes(run)
    budget = low + fraction * (high - low)
    limited = replace(run, memory=AutoCheckpointing(budget / GIB))
    resolved_run = resolve_auto_checkpointing(RunVariant(limited)).run
    peak = peak_memory.worst_rank_breakdown(resolved_run).peak
    assert 0.9 * budget < peak <= budget
    rates = step_time.device_rates(run)
    assert rates is not None
    recompute_s = step_time.recompute_seconds(resolved_run, rates)
    other_recompute_s = [
        step_time.recompute_seconds(it, rates)
        for it in all_mixtures(run)
        if peak_memory.worst_rank_breakdown(it).peak <= budget
    ]
    assert recompute_s <= min(other_recompute_s) * 1.001


def test_auto_checkpointing_recomputes_nothing_on_a_large_device(compose: Compose) -> None:
    run = compose(*LARGE_DEVICE, "memory=auto", "memory.budget_gib=1000", check_machine=False)
    assert resolve_auto_checkpointing(RunVariant(run)) == RunVariant(
        replace(run, memory=FixedCheckpointing()), ("memory=none",)
    )


@pytest.mark.parametrize(
    "memory",
    [
        FixedCheckpointing(),
        FixedCheckpointing(Recompute.selective),
        FixedCheckpointing(Recompute.full),
        FixedCheckpointing(Recompute.full, 2.5),
        FixedCheckpointing(Recompute.selective, 2.5),
        FixedCheckpointing(Recompute.full, 1.6, Recompute.selective),
        FixedCheckpointing(Recompute.full, offload=True),
    ],
)
def test_checkpointing_overrides_select_the_config(
    memory: FixedCheckpointing, compose: Compose
) -> None:
    overrides = checkpointing_overrides(memory)
    assert compose(*TRAINING, *overrides, check_machine=False).memory == memory


def test_auto_checkpointing_defaults_to_the_device_memory(compose: Compose) -> None:
    assert build_plan(compose(*TRAINING, check_machine=False)).fit.status is not FitStatus.fits
    plan = build_plan(compose(*TRAINING, "memory=auto", check_machine=False))
    assert plan.fit.status is FitStatus.fits
    assert plan.overrides[0].startswith("memory=checkpoint_")
    assert compose(*TRAINING, *plan.overrides, check_machine=False).memory == plan.run.memory


def test_auto_checkpointing_budget_is_capped_by_the_device(compose: Compose) -> None:
    default_plan, large_device_plan = (
        build_plan(compose(*TRAINING, "memory=auto", *budget, check_machine=False))
        for budget in ((), ("memory.budget_gib=200",))
    )
    assert large_device_plan.fit.status is not FitStatus.out_of_memory
    assert large_device_plan.fit.peak >= default_plan.fit.peak


def test_auto_checkpointing_reports_that_it_does_not_suffice(compose: Compose) -> None:
    oversized_overrides = (*TRAINING, "trainer.micro_batch=64", "memory=auto")
    assert (
        build_plan(compose(*oversized_overrides, check_machine=False)).fit.status
        is FitStatus.out_of_memory
    )
    with pytest.raises(ConfigError, match=r"budget_gib=1.0: is less than the .* that remain"):
        build_plan(compose(*TRAINING, "memory=auto", "memory.budget_gib=1", check_machine=False))


def test_auto_checkpointing_recomputes_nothing_with_a_split_backward(compose: Compose) -> None:
    run = compose(*ZERO_BUBBLE, "memory=auto", check_machine=False)
    small_device = replace(run, hardware=replace(run.hardware, memory_gib=10))
    variant = resolve_auto_checkpointing(RunVariant(small_device))
    assert variant.overrides == ("memory=none",)
    assert variant.fit.status is FitStatus.out_of_memory
    with pytest.raises(ConfigError, match=r"budget_gib=1: .* that remain with no recomputation"):
        resolve_auto_checkpointing(RunVariant(replace(run, memory=AutoCheckpointing(1))))
