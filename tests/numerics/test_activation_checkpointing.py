"""Activation checkpointing changes memory but no step."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks

ALL_STRATEGIES = {"single": ("parallelism=single",), **STRATEGIES}
OPTIONS = {
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_mixture": ("memory=checkpoint_every_n", "memory.otherwise=selective"),
    "loss_chunk": ("objective.loss_chunk=24",),
    "offload": ("memory=offload_activations",),
    "offload_all": ("memory=offload_activations", "memory.recompute=nothing"),
}
RECOMPUTING = ("checkpoint_full", "checkpoint_selective", "checkpoint_mixture", "offload")
CI_STRATEGIES = {
    "checkpoint_mixture": (),
    "checkpoint_selective": ("fsdp",),
    "loss_chunk": ("tensor",),
    "checkpoint_full": ("pipeline_one_f_one_b",),
    "offload": ("tensor",),
    "offload_all": ("fsdp",),
}
CASES = [
    pytest.param(
        strategy, option, marks=marks(strategy) + (() if runs_in_ci else (pytest.mark.exhaustive,))
    )
    for strategy in ALL_STRATEGIES
    for option in OPTIONS
    for runs_in_ci in [strategy in CI_STRATEGIES[option]]
    if not ("zero_bubble" in strategy and option in RECOMPUTING)  # which is rejected
]


@pytest.mark.parametrize(("strategy", "option"), CASES)
def test_activation_checkpointing_changes_no_step(
    strategy: str, option: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(ALL_STRATEGIES[strategy], "combined", run_job, *OPTIONS[option])
    assert_same_training(run, reference_run("combined"))


@pytest.mark.exhaustive  # CI measures the entries of the memory breakdown
def test_activation_checkpointing_saves_memory(tmp_path: Path, shared_cache: Path) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    base_overrides = (*TINY_DECODER, *LLAMA, "trainer.max_steps=3", "trainer.micro_batch=8")
    metrics_by_option = {
        option: run_job.without_defaults(*base_overrides, *overrides).summary["metrics"]
        for option, overrides in {"none": (), **OPTIONS}.items()
        if option != "offload"
    }
    activation_bytes = {
        option: metrics["memory/activations_bytes"] for option, metrics in metrics_by_option.items()
    }
    assert activation_bytes["checkpoint_full"] < activation_bytes["checkpoint_mixture"]
    assert (
        activation_bytes["checkpoint_mixture"]
        < activation_bytes["checkpoint_selective"]
        < activation_bytes["none"]
    )
    # Only the input of a block is saved; logits are not recomputed.
    assert activation_bytes["checkpoint_full"] < 0.5 * activation_bytes["none"]
    assert activation_bytes["offload_all"] < activation_bytes["checkpoint_full"]
    logits = 8 * 32 * 256 * 4
    peaks = {option: metrics["memory/peak_bytes"] for option, metrics in metrics_by_option.items()}
    assert peaks["loss_chunk"] < peaks["none"] - logits
