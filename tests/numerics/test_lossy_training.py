"""Lossy training converges within a stated distance of exact training."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.strategies import STRATEGIES

from scalewise.hardware import DeviceKind, Hardware, resolve_for_machine

TRAINING = (
    "experiment=smoke",
    "model.layers=2",
    "model.width=64",
    "trainer.max_steps=60",
    "trainer.validate_every=60",
    "optimizer.lr=5e-3",
    "tracking=none",
    "launch.isolation=process",
)
MAX_LOSS_DIFFERENCE = 0.02
"""Largest relative difference of the validation loss after 60 steps."""

EXHAUSTIVE = pytest.mark.exhaustive
HOOKS = {
    "fp16": (),
    "powersgd": ("parallelism.lossless_steps=10",),
    "fp16_powersgd": ("parallelism.lossless_steps=10",),
    "post_local_sgd": ("parallelism.lossless_steps=10",),
}
BF16 = ("ddp", "fsdp", "hsdp", "tensor", "context", "pipeline_one_f_one_b", "shard_tensor")
EMULATES_BF16 = resolve_for_machine(Hardware(device=DeviceKind.cpu)).emulates_bf16
CI_STRATEGIES = () if EMULATES_BF16 else ("fsdp",)
"""With emulated bf16, each takes minutes."""


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> RunDir:
    return JobRunner(tmp_path_factory.mktemp("exact"), shared_cache).without_defaults(
        *TRAINING, *STRATEGIES["ddp"]
    )


def assert_near(run: RunDir, exact_run: RunDir) -> None:
    first, last = exact_run.column("train/loss")[0], exact_run.column("val/loss")[-1]
    assert last < 0.8 * first, "it learns"
    assert run.column("val/loss")[-1] == pytest.approx(last, rel=MAX_LOSS_DIFFERENCE)


@pytest.mark.parametrize(
    "hook", [pytest.param(x, marks=() if x == "fp16" else EXHAUSTIVE) for x in HOOKS]
)
def test_compressed_gradients_converge(
    hook: str, exact_run: RunDir, tmp_path: Path, shared_cache: Path
) -> None:
    overrides = (*STRATEGIES["ddp"], f"parallelism.comm_hook={hook}", *HOOKS[hook])
    run = JobRunner(tmp_path, shared_cache).without_defaults(*TRAINING, *overrides)
    assert run.column("train/loss") != exact_run.column("train/loss"), "the hook is at work"
    assert_near(run, exact_run)


@pytest.mark.parametrize("precision", ["bf16_mixed", pytest.param("bf16_true", marks=EXHAUSTIVE)])
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(x, marks=() if x in CI_STRATEGIES else EXHAUSTIVE) for x in BF16],
)
def test_bf16_converges_under_each_strategy(
    strategy: str, precision: str, exact_run: RunDir, tmp_path: Path, shared_cache: Path
) -> None:
    micro_batch = "trainer.micro_batch=4" if "pipeline" in strategy else "trainer.micro_batch=2"
    overrides = (*STRATEGIES[strategy], f"precision={precision}", micro_batch)
    run = JobRunner(tmp_path, shared_cache).without_defaults(*TRAINING, *overrides)
    assert_near(run, exact_run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp8_converges(
    strategy: str, recipe: str, exact_run: RunDir, tmp_path: Path, shared_cache: Path
) -> None:
    fp8 = ("precision=fp8", "precision.compute=fp32", f"precision.recipe={recipe}")
    run = JobRunner(tmp_path, shared_cache).without_defaults(*TRAINING, *STRATEGIES[strategy], *fp8)
    assert run.column("train/loss") != exact_run.column("train/loss"), "fp8 is at work"
    assert_near(run, exact_run)


def test_powersgd_of_many_buckets_reduces_in_the_same_order_on_each_rank(
    tmp_path: Path, shared_cache: Path
) -> None:
    """In different orders, the sizes of reductions differ between ranks, and gloo aborts."""
    hook = ("parallelism.comm_hook=powersgd", "parallelism.lossless_steps=2")
    run_job = JobRunner(tmp_path, shared_cache)
    run_job("parallelism=ddp", *hook, "parallelism.bucket_mib=0.05", "trainer.max_steps=40")
