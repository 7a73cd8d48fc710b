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
LINE = (
    "model=decoder_nano",
    "hardware=h100",
    "hardware.devices_per_node=2",
    "trainer.micro_batch=auto",
)
LARGE = ("model=llama_160m", "data.sequence=32")
"""Much state and few tokens: twice the micro-batch is within the error of the prediction."""
STATED = [
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


def limited(compose: Compose, *overrides: str, rows: int = 8) -> RunConfig:
    """A run whose device is as large as ``rows`` at a time ask for."""
    roomy = compose(*LINE, "trainer.global_batch=64", *overrides, check_machine=False)
    needed = check_fit(replace(roomy, trainer=replace(roomy.trainer, micro_batch=rows))).reserved[2]
    return compose(
        *roomy.overrides, f"hardware.memory_gib={needed / GIB + 1e-6:.9f}", check_machine=False
    )


@pytest.mark.parametrize("strategy", ["single", *STATED])
def test_auto_micro_batch_takes_the_largest_that_fits(strategy: str, compose: Compose) -> None:
    line = STRATEGIES[strategy] if strategy != "single" else ()
    run = limited(compose, *line)
    variant = auto_settings.resolve_auto_micro_batch(RunVariant(run))
    found, told = variant.run, variant.overrides
    assert told == ("trainer.micro_batch=8",)
    assert check_fit(found).status is FitStatus.fits
    assert found.global_batch == 64
    readers = found.parallelism.data_parallel_size
    assert found.micro_batch * readers * found.accumulation == 64
    twice = replace(found, trainer=replace(found.trainer, micro_batch=16))
    assert check_fit(twice).status is not FitStatus.fits
    assert compose(*run.overrides, *told, check_machine=False).trainer == found.trainer


def test_auto_micro_batch_tries_divisors_only(compose: Compose) -> None:
    piped = (*STRATEGIES["pipeline_one_f_one_b"], "trainer.global_batch=12")
    rows = [
        variant.run.micro_batch
        for variant in auto_settings.micro_batch_variants(
            RunVariant(compose(*LINE, *piped, check_machine=False))
        )
    ]
    assert rows == [2, 4, 6, 12]
    stepped = ("optimizer.in_backward=true", "trainer.clip_norm=null", "trainer.global_batch=12")
    (variant,) = auto_settings.micro_batch_variants(
        RunVariant(compose(*LINE, *stepped, check_machine=False))
    )
    assert variant.run.micro_batch == 12


def test_larger_micro_batches_take_more_memory(compose: Compose) -> None:
    variants = auto_settings.micro_batch_variants(RunVariant(limited(compose)))
    for small, large in pairwise(variants):
        assert check_fit(small.run).breakdown.peak < check_fit(large.run).breakdown.peak, small


def test_plan_sizes_micro_batches_by_prediction(compose: Compose) -> None:
    plan = build_plan(limited(compose))
    assert plan.overrides == ("trainer.micro_batch=8",)
    assert plan.run.micro_batch == 8
    tight = compose(
        *LINE, "trainer.global_batch=64", "hardware.memory_gib=0.0001", check_machine=False
    )
    assert build_plan(tight).run.micro_batch == 1
    assert build_plan(tight).fit.status is FitStatus.out_of_memory


def tried(run: RunConfig, ends: dict[int, str]) -> auto_settings.MicroBatchChoice:
    return auto_settings.choose_by_probes(run, lambda it: ends[it.micro_batch])


@pytest.mark.parametrize(
    ("ends", "rows", "order"),
    [
        ({8: "ok", 16: "out_of_memory"}, 8, [8, 16]),
        ({8: "out_of_memory", 4: "out_of_memory", 2: "ok"}, 2, [8, 4, 2]),
        ({8: "failed"}, 8, [8]),
        ({8: "ok", 16: "timeout"}, 8, [8, 16]),
        ({8: "out_of_memory", 4: "failed"}, 4, [8, 4]),
    ],
)
def test_micro_batch_trials_step_down_without_memory(
    ends: dict[int, str], rows: int, order: list[int], compose: Compose
) -> None:
    run = limited(compose, *LARGE)
    assert [variant.fit.status for variant in auto_settings.micro_batch_variants(RunVariant(run))][
        3:5
    ] == [
        FitStatus.fits,
        FitStatus.borderline,
    ]
    found = tried(run, ends)
    assert found.micro_batch == rows
    assert [probe.micro_batch for probe in found.probes] == order
    assert f"{order[-1]} {ends[order[-1]]}" in found.description


def test_micro_batch_trials_step_up_to_borderline_sizes(compose: Compose) -> None:
    run = limited(compose, *LARGE)
    doubted = [
        variant.run.micro_batch
        for variant in auto_settings.micro_batch_variants(RunVariant(run))
        if variant.fit.status is FitStatus.borderline
    ]
    found = tried(run, dict.fromkeys((8, *doubted), "ok"))
    assert found.micro_batch == max(doubted)
    assert found.fit_status is FitStatus.borderline


def test_micro_batch_trials_that_cannot_run_say_so(compose: Compose) -> None:
    found = auto_settings.choose_by_probes(limited(compose), None, "not tried, as it is far away")
    assert (found.micro_batch, found.probes) == (8, ())
    assert found.description == "predicted: fits; not tried, as it is far away"


def test_external_ranks_size_micro_batches_by_prediction(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        monkeypatch.setenv(rank, "0")
        monkeypatch.setenv(size, "1")
    overrides = ("experiment=smoke", "hardware=cpu", "trainer.micro_batch=auto")
    run, found = auto_resolution.resolve_auto(compose(*overrides))
    assert run.trainer.micro_batch == run.global_batch == 8
    assert found is not None
    assert "torchrun" in found.description


def test_run_without_fitting_micro_batch_is_rejected_with_a_fix(compose: Compose) -> None:
    run = limited(compose, "model=llama_160m", "data.sequence=2048", rows=1)
    least = check_fit(replace(run, trainer=replace(run.trainer, micro_batch=1))).reserved[0]
    small = replace(run, hardware=replace(run.hardware, memory_gib=0.9 * least / GIB))
    with pytest.raises(ConfigError, match=r"micro_batch=auto: micro-batch 1 needs.*; set "):
        auto_settings.choose_by_probes(small, None)
    with pytest.raises(ConfigError, match="a probe run ran out of memory"):
        tried(run, {1: "out_of_memory"})


def test_micro_batch_trial_is_a_short_run(compose: Compose) -> None:
    overrides = (
        "experiment=smoke",
        "hardware=cpu",
        "trainer.global_batch=64",
        "checkpoint.every=1",
    )
    run = compose(*overrides, "trainer.micro_batch=4")
    short = shorten_run(run)
    assert (short.trainer.max_steps, short.accumulation, short.micro_batch) == (2, 8, 4)
    on_gpu = replace(run, hardware=replace(run.hardware, device=DeviceKind.cuda))
    assert shorten_run(on_gpu).accumulation == 2
    assert short.checkpoint == CheckpointConfig(best=False, at_end=True)
    assert check_fit(short).breakdown.peak == check_fit(run).breakdown.peak
    assert shorten_run(replace(run, trainer=replace(run.trainer, micro_batch=64))).accumulation == 1
