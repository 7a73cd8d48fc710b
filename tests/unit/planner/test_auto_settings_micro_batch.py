"""``trainer.micro_batch=auto``: by prediction or by trials, with a constant global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from fixtures.strategies import STRATEGIES

from scalewise.checkpoint_config import CheckpointConfig
from scalewise.commands import auto_resolution
from scalewise.errors import ConfigError
from scalewise.hardware import DeviceKind
from scalewise.launch.memory_probe_run import shorten_run
from scalewise.planner import auto_settings
from scalewise.planner.fit_check import FitStatus, RunVariant, check_fit
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig
from scalewise.units import GIB

Compose = Callable[..., RunConfig]
TRAINING = (
    "model=decoder_nano",
    "hardware=h100",
    "hardware.devices_per_node=2",
    "trainer.micro_batch=auto",
)
LARGE_MODEL = ("model=llama_160m", "data.sequence=32")
"""Large state and few tokens: doubling the micro-batch is within the prediction error."""
STRATEGY_NAMES = [
    "ddp",
    "fsdp",
    "hsdp",
    "tensor",
    "context",
    "pipeline_one_f_one_b",
    "pipeline_zbv_zero_bubble",
    "shard_tensor",
    "deepspeed_zero2",
    "deepspeed_zero3",
]


def run_that_fits(compose: Compose, *overrides: str, micro_batch: int = 8) -> RunConfig:
    """Run with a device whose memory fits a micro-batch of ``micro_batch`` exactly."""
    unlimited_run = compose(*TRAINING, "trainer.global_batch=64", *overrides, check_machine=False)
    reserved_bytes = check_fit(
        replace(unlimited_run, trainer=replace(unlimited_run.trainer, micro_batch=micro_batch))
    ).reserved[2]
    return compose(
        *unlimited_run.overrides,
        f"hardware.memory_gib={reserved_bytes / GIB + 1e-6:.9f}",
        check_machine=False,
    )


@pytest.mark.parametrize("strategy", ["single", *STRATEGY_NAMES])
def test_auto_micro_batch_takes_the_largest_that_fits(strategy: str, compose: Compose) -> None:
    strategy_overrides = STRATEGIES[strategy] if strategy != "single" else ()
    run = run_that_fits(compose, *strategy_overrides)
    variant = auto_settings.resolve_auto_micro_batch(RunVariant(run))
    resolved_run, variant_overrides = variant.run, variant.overrides
    assert variant_overrides == ("trainer.micro_batch=8",)
    assert check_fit(resolved_run).status is FitStatus.fits
    assert resolved_run.global_batch == 64
    readers = resolved_run.parallelism.data_parallel_size
    assert resolved_run.micro_batch * readers * resolved_run.accumulation == 64
    doubled_run = replace(resolved_run, trainer=replace(resolved_run.trainer, micro_batch=16))
    assert check_fit(doubled_run).status is not FitStatus.fits
    assert (
        compose(*run.overrides, *variant_overrides, check_machine=False).trainer
        == resolved_run.trainer
    )


def test_auto_micro_batch_tries_divisors_only(compose: Compose) -> None:
    pipeline_overrides = (*STRATEGIES["pipeline_one_f_one_b"], "trainer.global_batch=12")
    micro_batches = [
        variant.run.micro_batch
        for variant in auto_settings.micro_batch_variants(
            RunVariant(compose(*TRAINING, *pipeline_overrides, check_machine=False))
        )
    ]
    assert micro_batches == [2, 4, 6, 12]
    stepped = ("optimizer.in_backward=true", "trainer.clip_norm=null", "trainer.global_batch=12")
    (variant,) = auto_settings.micro_batch_variants(
        RunVariant(compose(*TRAINING, *stepped, check_machine=False))
    )
    assert variant.run.micro_batch == 12


def test_larger_micro_batches_take_more_memory(compose: Compose) -> None:
    variants = auto_settings.micro_batch_variants(RunVariant(run_that_fits(compose)))
    for smaller, larger in pairwise(variants):
        assert check_fit(smaller.run).breakdown.peak < check_fit(larger.run).breakdown.peak, smaller


def test_plan_sizes_micro_batches_by_prediction(compose: Compose) -> None:
    plan = build_plan(run_that_fits(compose))
    assert plan.overrides == ("trainer.micro_batch=8",)
    assert plan.run.micro_batch == 8
    tight_run = compose(
        *TRAINING, "trainer.global_batch=64", "hardware.memory_gib=0.0001", check_machine=False
    )
    assert build_plan(tight_run).run.micro_batch == 1
    assert build_plan(tight_run).fit.status is FitStatus.out_of_memory


def choose_with_outcomes(
    run: RunConfig, outcomes: dict[int, str]
) -> auto_settings.MicroBatchChoice:
    return auto_settings.choose_by_probes(run, lambda it: outcomes[it.micro_batch])


@pytest.mark.parametrize(
    ("outcomes", "micro_batch", "order"),
    [
        ({8: "ok", 16: "out_of_memory"}, 8, [8, 16]),
        ({8: "out_of_memory", 4: "out_of_memory", 2: "ok"}, 2, [8, 4, 2]),
        ({8: "failed"}, 8, [8]),
        ({8: "ok", 16: "timeout"}, 8, [8, 16]),
        ({8: "out_of_memory", 4: "failed"}, 4, [8, 4]),
    ],
)
def test_micro_batch_trials_step_down_without_memory(
    outcomes: dict[int, str], micro_batch: int, order: list[int], compose: Compose
) -> None:
    run = run_that_fits(compose, *LARGE_MODEL)
    assert [variant.fit.status for variant in auto_settings.micro_batch_variants(RunVariant(run))][
        3:5
    ] == [
        FitStatus.fits,
        FitStatus.borderline,
    ]
    choice = choose_with_outcomes(run, outcomes)
    assert choice.micro_batch == micro_batch
    assert [probe.micro_batch for probe in choice.probes] == order
    assert f"{order[-1]} {outcomes[order[-1]]}" in choice.description


def test_micro_batch_trials_step_up_to_borderline_sizes(compose: Compose) -> None:
    run = run_that_fits(compose, *LARGE_MODEL)
    borderline_sizes = [
        variant.run.micro_batch
        for variant in auto_settings.micro_batch_variants(RunVariant(run))
        if variant.fit.status is FitStatus.borderline
    ]
    choice = choose_with_outcomes(run, dict.fromkeys((8, *borderline_sizes), "ok"))
    assert choice.micro_batch == max(borderline_sizes)
    assert choice.fit_status is FitStatus.borderline


def test_micro_batch_trials_that_cannot_run_say_so(compose: Compose) -> None:
    choice = auto_settings.choose_by_probes(
        run_that_fits(compose), None, "not tried, as it is far away"
    )
    assert (choice.micro_batch, choice.probes) == (8, ())
    assert choice.description == "predicted: fits; not tried, as it is far away"


def test_external_ranks_size_micro_batches_by_prediction(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        monkeypatch.setenv(rank, "0")
        monkeypatch.setenv(size, "1")
    overrides = ("experiment=smoke", "hardware=cpu", "trainer.micro_batch=auto")
    run, choice = auto_resolution.resolve_auto(compose(*overrides))
    assert run.trainer.micro_batch == run.global_batch == 8
    assert choice is not None
    assert "torchrun" in choice.description


def test_run_without_fitting_micro_batch_is_rejected_with_a_fix(compose: Compose) -> None:
    run = run_that_fits(compose, "model=llama_160m", "data.sequence=2048", micro_batch=1)
    min_bytes = check_fit(replace(run, trainer=replace(run.trainer, micro_batch=1))).reserved[0]
    small_run = replace(run, hardware=replace(run.hardware, memory_gib=0.9 * min_bytes / GIB))
    with pytest.raises(ConfigError, match=r"micro_batch=auto: micro-batch 1 needs.*; set "):
        auto_settings.choose_by_probes(small_run, None)
    with pytest.raises(ConfigError, match="a probe run ran out of memory"):
        choose_with_outcomes(run, {1: "out_of_memory"})


def test_micro_batch_trial_is_a_short_run(compose: Compose) -> None:
    overrides = (
        "experiment=smoke",
        "hardware=cpu",
        "trainer.global_batch=64",
        "checkpoint.every=1",
    )
    run = compose(*overrides, "trainer.micro_batch=4")
    short_run = shorten_run(run)
    assert (short_run.trainer.max_steps, short_run.accumulation, short_run.micro_batch) == (2, 8, 4)
    on_gpu = replace(run, hardware=replace(run.hardware, device=DeviceKind.cuda))
    assert shorten_run(on_gpu).accumulation == 2
    assert short_run.launch.memory_limit_gib is None
    assert short_run.checkpoint == CheckpointConfig(best=False, at_end=True)
    assert check_fit(short_run).breakdown.peak == check_fit(run).breakdown.peak
    assert shorten_run(replace(run, trainer=replace(run.trainer, micro_batch=64))).accumulation == 1


@pytest.mark.parametrize(
    ("limit", "memory", "probe_limit"), [(None, 80.5, 76.0), (40.0, 80.5, 38.0), (None, None, None)]
)
def test_micro_batch_trial_on_cuda_leaves_headroom(
    compose: Compose, limit: float | None, memory: float | None, probe_limit: float | None
) -> None:
    run = compose("experiment=smoke", "hardware=cpu", "trainer.micro_batch=4")
    hardware = replace(run.hardware, device=DeviceKind.cuda, memory_gib=memory, context_gib=0.5)
    run = replace(run, hardware=hardware, launch=replace(run.launch, memory_limit_gib=limit))
    assert shorten_run(run).launch.memory_limit_gib == probe_limit
