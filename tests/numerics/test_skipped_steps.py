"""Skipped steps and clipping at a percentile: a hand-written step, and every strategy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.cli_runner import RunDir, same_weights
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    SGD,
    ReferenceRun,
    assert_same_training,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER

STEPS, WINDOW, PERCENTILE, SIGMA = 8, 2, 60, 0.5
STATISTICS = (
    f"trainer.max_steps={STEPS}",
    "trainer.validate_every=4",
    f"trainer.rolling_window={WINDOW}",
    f"trainer.clip_percentile={PERCENTILE}",
    f"trainer.skip_sigma={SIGMA}",
)
"""A window so short that losses of random tokens count as spikes."""
CI_STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline_one_f_one_b")


def skipped_steps(run: RunDir) -> list[bool]:
    """Whether each step was skipped."""
    return [count > 0 for count in np.diff(run.column("train/skipped_steps"), prepend=0)]


def test_updates_equal_a_hand_written_step(tmp_path: Path, shared_cache: Path) -> None:
    rate = 0.3
    plain = (
        *(f"optimizer.lr={rate}", "optimizer.momentum=0", "optimizer.weight_decay=0"),
        *("checkpoint.every=1", "checkpoint.keep=0", "trainer.global_batch=12"),
    )
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER, *LLAMA, *SGD, *STATISTICS, *plain, "trainer.micro_batch=6"
    )
    losses, norms = run.column("train/loss"), run.column("train/grad_norm")
    kept: list[int] = []
    skipped = []
    for step in range(STEPS):
        window = kept[-WINDOW:]
        limit = 1.0
        is_spike = False
        if len(window) == WINDOW:
            limit = np.percentile([norms[it] for it in window], PERCENTILE)
            is_spike = any(
                column[step]
                > np.mean([column[it] for it in window])
                + SIGMA * np.std([column[it] for it in window], ddof=1)
                for column in (losses, norms)
            )
        skipped.append(is_spike)
        if step:
            gradients, factor = load_gradients(run, step), min(1.0, limit / norms[step])
            before, after = run.weights(step), run.weights(step + 1)
            if is_spike:
                assert same_weights(after, before), step
            for name, gradient in gradients.items() if not is_spike else ():
                expected = before[name] - rate * factor * gradient
                torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)
        if not is_spike:
            kept.append(step)
    assert skipped == skipped_steps(run)
    assert 1 < sum(skipped) < STEPS - WINDOW


OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "adamw_offload": ("optimizer=adamw", "optimizer.offload=true"),
    "adamw_sharded": ("optimizer=adamw", "optimizer.shard=true", "parallelism=ddp"),
    "adamw_8bit": ("optimizer=adamw_8bit",),
    "adafactor": ("optimizer=adafactor",),
    "lion": ("optimizer=lion",),
    "muon": ("optimizer=muon",),
    "muon_fsdp": ("optimizer=muon", "parallelism=fsdp"),
    "schedule_free": ("optimizer=schedule_free", "schedule=constant"),
}
CI_OPTIMIZERS = ("adamw", "muon_fsdp")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CI_OPTIMIZERS else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ],
)
def test_skipped_step_changes_no_weight(name: str, tmp_path: Path, shared_cache: Path) -> None:
    every_step = ("checkpoint.every=1", "checkpoint.keep=0", "trainer.validate_every=null")
    batch = ("trainer.global_batch=12", "trainer.micro_batch=6", "trainer.skip_sigma=2")
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER, *LLAMA, *STATISTICS, *every_step, *batch, *OPTIMIZERS[name]
    )
    skipped = skipped_steps(run)
    assert 0 < sum(skipped) < STEPS - WINDOW
    for step in range(1, STEPS):
        is_unchanged = same_weights(run.weights(step + 1), run.weights(step))
        assert is_unchanged == skipped[step], step


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, marks=() if strategy in CI_STRATEGIES else pytest.mark.exhaustive)
        for strategy in STRATEGIES
        if not strategy.startswith("deepspeed")  # which rejects them
    ],
)
def test_statistics_under_a_strategy_equal_one_device(
    strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "combined", run_job, *STATISTICS)
    reference = reference_run("combined", *STATISTICS)
    assert skipped_steps(run) == skipped_steps(reference)
    assert any(skipped_steps(reference))
    assert_same_training(run, reference)


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_step_with_nan_gradients_is_skipped(
    strategy: str, tmp_path: Path, shared_cache: Path
) -> None:
    fault = (
        *("trusted_packages=[fixtures]", "callbacks=[guard]"),
        "+callbacks.fault._target_=fixtures.faults.NaNGradient",
    )
    overrides = (*TINY_DECODER, *LLAMA, *fault, *STRATEGIES.get(strategy, ()))
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *overrides, "trainer.skip_sigma=6", "trainer.max_steps=6", "schedule.warmup_steps=1"
    )
    assert skipped_steps(run) == [False, False, True, False, False, False]
    assert len(run.column("train/loss")) == 6
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())


def test_consecutive_skipped_steps_end_the_run(tmp_path: Path, shared_cache: Path) -> None:
    overrides = (*TINY_DECODER, *LLAMA, *SGD, *STATISTICS, "trainer.max_skipped_steps=1")
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *overrides, "trainer.global_batch=12", "trainer.micro_batch=6", status="failed"
    )
    assert "consecutive skipped step number 1" in run.status["reason"]
    assert "raise trainer.skip_sigma" in run.status["reason"]
