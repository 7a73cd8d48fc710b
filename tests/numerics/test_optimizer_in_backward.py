"""Optimizer steps in backward: the same numbers without stored gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.cli_runner import same_weights
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import TOLERANCE, ReferenceRun, assert_tensors_close, train_strategy
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER

IN_BACKWARD = "optimizer.in_backward=true"
LATE_REDUCTION = ("ddp", "deepspeed", "pipeline")
ALL_STRATEGIES = {"single": ("parallelism=single",), **STRATEGIES}
CI_STRATEGIES = ("fsdp", "tensor")
ADAMW = (
    *TINY_DECODER,
    *LLAMA,
    "trainer.clip_norm=null",
    "trainer.max_steps=4",
    "trainer.micro_batch=4",
    "trainer.log_every=1",
    "schedule.warmup_steps=1",
)


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path, shared_cache)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name in CI_STRATEGIES else pytest.mark.exhaustive)
        for name in ALL_STRATEGIES
        if not (name.startswith(LATE_REDUCTION) or "offload" in name)  # which is rejected
    ],
)
def test_optimizer_in_backward_under_each_strategy_equals_one_device(
    strategy: str, reference_run: ReferenceRun, run_job: JobRunner
) -> None:
    run, reference = (
        train_strategy(ALL_STRATEGIES[strategy], "one_micro_batch", run_job, IN_BACKWARD),
        reference_run("one_micro_batch"),
    )
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=TOLERANCE), key
    assert_tensors_close(run.weights(), reference.weights(), "weights")
    assert run.summary["metrics"]["memory/gradients_bytes"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "adamw_8bit",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("adafactor", "adamw", "lion", "muon", "sgd")
        ),
    ],
)
def test_optimizer_in_backward_equals_a_separate_step(name: str, run_job: JobRunner) -> None:
    step_after_backward, step_in_backward = (
        run_job.without_defaults(
            *ADAMW, f"optimizer={name}", f"optimizer.in_backward={in_backward}"
        )
        for in_backward in ("false", "true")
    )
    assert step_in_backward.column("train/loss") == step_after_backward.column("train/loss")
    assert same_weights(step_in_backward.weights(), step_after_backward.weights())


def test_optimizer_in_backward_checkpoints_are_interchangeable(run_job: JobRunner) -> None:
    full_run = run_job.without_defaults(*ADAMW, "checkpoint.every=2")
    resumed = run_job.without_defaults(*ADAMW, IN_BACKWARD, resume=full_run.checkpoint(2))
    assert resumed.column("train/loss") == full_run.column("train/loss")
    assert same_weights(resumed.weights(), full_run.weights())
