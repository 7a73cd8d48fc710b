"""Activation checkpointing changes memory but no step."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks

EVERY = {"single": ("parallelism=single",), **STRATEGIES}
OPTIONS = {
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_mixture": ("memory=checkpoint_every_n", "memory.otherwise=selective"),
    "loss_chunk": ("objective.loss_chunk=24",),
    "offload": ("memory=offload_activations",),
    "offload_all": ("memory=offload_activations", "memory.recompute=nothing"),
}
SELECTIVE = ("checkpoint_selective", "checkpoint_mixture")
USUAL = {
    "checkpoint_mixture": (),
    "checkpoint_selective": ("fsdp",),
    "loss_chunk": ("tensor",),
    "checkpoint_full": ("pipeline_zbv_zero_bubble",),
    "offload": ("tensor",),
    "offload_all": ("fsdp",),
}
CASES = [
    pytest.param(
        strategy, option, marks=marks(strategy) + (() if usual else (pytest.mark.exhaustive,))
    )
    for strategy in EVERY
    for option in OPTIONS
    for usual in [strategy in USUAL[option]]
    if not ("zero_bubble" in strategy and option in SELECTIVE)  # which is rejected
]


@pytest.mark.parametrize(("strategy", "option"), CASES)
def test_activation_checkpointing_changes_no_step(
    strategy: str, option: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(EVERY[strategy], "all_at_once", run_job, *OPTIONS[option])
    assert_same_training(run, reference_run("all_at_once"))


@pytest.mark.exhaustive  # CI measures the entries of the memory breakdown
def test_activation_checkpointing_saves_memory(tmp_path: Path, shared_cache: Path) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    rows = (*TINY_DECODER, *LLAMA, "trainer.max_steps=3", "trainer.micro_batch=8")
    found = {
        option: run_job.without_defaults(*rows, *parts).summary["metrics"]
        for option, parts in {"nothing": (), **OPTIONS}.items()
        if option != "offload"
    }
    kept = {option: metrics["memory/activations_bytes"] for option, metrics in found.items()}
    assert kept["checkpoint_full"] < kept["checkpoint_mixture"]
    assert kept["checkpoint_mixture"] < kept["checkpoint_selective"] < kept["nothing"]
    # Nothing but its input is left of a block; logits are not forgotten here.
    assert kept["checkpoint_full"] < 0.5 * kept["nothing"]
    assert kept["offload_all"] < kept["checkpoint_full"]
    logits = 8 * 32 * 256 * 4
    peaks = {option: metrics["memory/peak_bytes"] for option, metrics in found.items()}
    assert peaks["loss_chunk"] < peaks["nothing"] - logits
