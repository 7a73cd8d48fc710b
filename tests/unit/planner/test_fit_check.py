"""Fit status of plans, and suggested fixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures.strategies import LLAMA_8B_STEP

from scalewise.planner.fit_check import RESERVED_FACTORS, FitReport, FitStatus, check_fit
from scalewise.planner.memory_breakdown import ALL_PHASES, MemoryBreakdown, MemoryEntry
from scalewise.planner.plan import Plan
from scalewise.run_config import RunConfig
from scalewise.typed_override import replace_overrides
from scalewise.units import GIB

Compose = Callable[..., RunConfig]


def breakdown_of_size(gib: float) -> MemoryBreakdown:
    entry = MemoryEntry("all", dict.fromkeys(ALL_PHASES, int(gib * GIB)), "", "")
    return MemoryBreakdown((entry,))


@pytest.mark.parametrize(
    ("gib", "fit_status"),
    [(70, FitStatus.fits), (75, FitStatus.borderline), (80.5, FitStatus.out_of_memory)],
)
def test_fit_status_includes_allocator_reserve(gib: float, fit_status: FitStatus) -> None:
    fit = FitReport(breakdown_of_size(gib), capacity=80 * GIB, context_bytes=GIB, on_cpu=False)
    assert fit.status is fit_status
    min_bytes, expected_bytes, max_bytes = fit.reserved
    assert min_bytes == int(gib * GIB) + GIB < expected_bytes < max_bytes
    assert fit.margin == 80 * GIB - expected_bytes


def test_cpu_reserve_equals_allocation() -> None:
    fit = FitReport(breakdown_of_size(79.5), capacity=80 * GIB, context_bytes=0, on_cpu=True)
    assert fit.status is FitStatus.fits
    assert (
        FitReport(breakdown_of_size(1), capacity=None, context_bytes=0, on_cpu=True).status
        is FitStatus.unknown
    )


def test_highest_prediction_has_a_rank_with_twice_the_mean_load(compose: Compose) -> None:
    experts = ("model=moe_nano", "data=synthetic", "parallelism=fsdp", "parallelism.shards=8")
    on_h100 = (*experts, "hardware=h100", "trainer.micro_batch=64")
    gathered, exchanged = (
        check_fit(compose(*on_h100, f"parallelism.expert={ranks}", check_machine=False))
        for ranks in (1, 4)
    )
    assert gathered.unbalanced_peak == 0
    assert exchanged.peak < exchanged.unbalanced_peak < 2 * exchanged.peak
    highest = int(exchanged.unbalanced_peak * RESERVED_FACTORS[2])
    assert exchanged.reserved[2] == highest + exchanged.context_bytes


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.micro_batch=8", "trainer.global_batch=64"),
        ("trainer.micro_batch=4", "trainer.global_batch=null"),
        ("trainer.micro_batch=2", "trainer.global_batch=64", "parallelism.shard=optimizer"),
        ("precision=fp32", "trainer.micro_batch=4"),
        ("parallelism=single", "trainer.micro_batch=8"),
        ("parallelism=ddp", "parallelism.replicas=8", "memory=checkpoint_full"),
        ("hardware=h100_8x4", "model=llama3_70b"),
        ("parallelism=mesh", "parallelism.tensor=4", "model=llama3_70b", "hardware=h100_8x4"),
    ],
    ids=" ".join,
)
def test_suggested_fix_makes_the_run_fit(
    overrides: tuple[str, ...], plan_of: Callable[..., Plan], compose: Compose
) -> None:
    changes_strategy = any(override.startswith("parallelism=") for override in overrides)
    typed_overrides = [
        *(
            override
            for override in LLAMA_8B_STEP
            if not (changes_strategy and "shards=" in override)
        ),
        *overrides,
    ]
    plan = plan_of(*typed_overrides)
    assert plan.fit.status is FitStatus.out_of_memory
    assert plan.suggested_fix is not None
    fixed_run = compose(
        *replace_overrides(typed_overrides, plan.suggested_fix.overrides), check_machine=False
    )
    typed_fit = check_fit(fixed_run)
    assert typed_fit.status is FitStatus.fits
    assert typed_fit.breakdown.peak == plan.suggested_fix.fit.breakdown.peak
    assert fixed_run.global_batch == plan.run.global_batch


def test_run_that_fits_has_no_suggested_fix(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(*LLAMA_8B_STEP, "memory=checkpoint_full")
    assert plan.fit.status is FitStatus.fits
    assert plan.suggested_fix is None


def test_memory_limit_reduces_the_device(plan_of: Callable[..., Plan]) -> None:
    full_device_plan = plan_of(*LLAMA_8B_STEP, "hardware=h200")
    limited_plan = plan_of(*LLAMA_8B_STEP, "hardware=h200", "launch.memory_limit_gib=80")
    assert limited_plan.fit.capacity == 80 * GIB < (full_device_plan.fit.capacity or 0)
    assert plan_of(*LLAMA_8B_STEP, "launch.memory_limit_gib=1000").fit.capacity == 80 * GIB


def test_plan_counts_tensors_that_a_split_backward_keeps(plan_of: Callable[..., Plan]) -> None:
    overrides = (
        *LLAMA_8B_STEP,
        "parallelism=pipeline",
        "parallelism.pipeline=4",
        "trainer.micro_batch=8",
        "parallelism.pipeline_schedule=interleaved_zero_bubble",
    )
    entries = {entry.name: entry.max_bytes for entry in plan_of(*overrides).fit.breakdown.entries}
    assert entries["kept for weight gradients"] > 0


def test_suggested_fix_keeps_the_device_count(plan_of: Callable[..., Plan]) -> None:
    base_overrides = [
        override for override in LLAMA_8B_STEP if not override.startswith("parallelism")
    ]
    eight = ("parallelism=ddp", "parallelism.replicas=8", "hardware.devices_per_node=8")
    fix = plan_of(*base_overrides, *eight).suggested_fix
    assert fix is not None
    assert fix.run.world_size == 8
