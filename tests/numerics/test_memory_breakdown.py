"""Predicted memory compared with measured peaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.strategies import needs_deepspeed

from scalewise import compose
from scalewise.bench.deepspeed_accuracy_runs import ZERO
from scalewise.bench.memory_accuracy_runs import (
    DROPOUT,
    EMA,
    MIXED,
    PACKING,
    SMALL,
    TRAINED,
    TRAINED_SELDOM,
)
from scalewise.planner import peak_memory
from scalewise.units import GIB

EXHAUSTIVE = pytest.mark.exhaustive
MUP = ("optimizer.lr_transfer=mup", "model.base_width=32", "model.base_heads=4")
PIPELINE = ("parallelism=pipeline", "parallelism.pipeline_schedule=one_f_one_b")


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("ledger"), shared_cache)


@pytest.mark.parametrize(
    "overrides",
    [
        *TRAINED,
        *(pytest.param(case, marks=EXHAUSTIVE) for case in (*TRAINED_SELDOM, MUP)),
    ],
    ids=" ".join,
)
def test_peak_memory_equals_prediction(overrides: tuple[str, ...], run_job: JobRunner) -> None:
    predicted = peak_memory.worst_rank_breakdown(compose((*SMALL, *overrides)))
    metrics = run_job.without_defaults(*SMALL, *overrides).summary["metrics"]
    assert metrics["plan/peak_bytes"] == predicted.peak
    error = predicted.peak / metrics["memory/peak_bytes"] - 1
    print(f"{' '.join(overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.02


@pytest.mark.exhaustive
def test_packed_texts_with_dropout_need_at_most_the_prediction(run_job: JobRunner) -> None:
    """The CPU has no fused kernel with dropout: memory depends on the lengths of the texts."""
    overrides = (*SMALL, DROPOUT, *PACKING)
    predicted = peak_memory.worst_rank_breakdown(compose(overrides)).peak
    measured = run_job.without_defaults(*overrides).summary["metrics"]["memory/peak_bytes"]
    assert predicted / 3 < measured < predicted


LARGE_LOGITS = ("model.vocabulary=4096", "model.layers=2")
TENSOR = "parallelism=tensor"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param((MIXED,), marks=EXHAUSTIVE),
        (TENSOR,),
        pytest.param((TENSOR, MIXED), marks=EXHAUSTIVE),
        pytest.param(("objective.loss_chunk=64",), marks=EXHAUSTIVE),
        pytest.param(("objective.loss_chunk=64", TENSOR), marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)
def test_peak_memory_with_z_loss_equals_prediction(
    overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    z_loss = ("objective.z_loss=1e-4", *LARGE_LOGITS)
    test_peak_memory_equals_prediction((*z_loss, *overrides), run_job)


COMPILED_BLOCKS = ("compile=block", "model.vocabulary=64", "data.vocabulary=64")
"""A loss so small that the peak is in a block."""
LORA_EVERYWHERE = ("adapter=lora", "adapter.targets=[.*]")


@EXHAUSTIVE
@pytest.mark.parametrize(
    "overrides",
    [
        ("memory=checkpoint_full",),
        ("memory=checkpoint_every_n",),
        ("memory=checkpoint_full", "model.feedforward=1024"),
        ("memory=checkpoint_full", "precision=bf16_mixed"),
        ("memory=checkpoint_full", "model.norm=layernorm", "model.activation=gelu"),
        ("memory=checkpoint_full", "adapter=lora"),
        ("memory=checkpoint_full", "adapter=dora"),
        ("memory=checkpoint_full", "adapter=lora", "precision=bf16_mixed"),
        ("memory=checkpoint_full", *LORA_EVERYWHERE),
        ("memory=checkpoint_full", *LORA_EVERYWHERE, "precision=bf16_true"),
        ("memory=checkpoint_selective",),
        ("adapter=lora",),
        ("adapter=dora",),
        ("adapter=lora", "adapter.dropout=0.1"),
        LORA_EVERYWHERE,
        ("model.dropout=0.1",),
        (),
    ],
    ids=" ".join,
)
def test_peak_memory_of_compiled_blocks_equals_prediction(
    overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    test_peak_memory_equals_prediction((*COMPILED_BLOCKS, *overrides), run_job)


BLOCKS = (*SMALL, "model.layers=16", "trainer.micro_batch=8")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param((), id="single"),
        pytest.param(PIPELINE, id="1f1b", marks=EXHAUSTIVE),
        pytest.param(("parallelism=fsdp",), id="fsdp", marks=EXHAUSTIVE),
        *(
            pytest.param(
                (f"parallelism=deepspeed_{zero}",), id=zero, marks=(EXHAUSTIVE, needs_deepspeed)
            )
            for zero in ("zero2", "zero3")
        ),
    ],
)
@pytest.mark.parametrize("fraction", [0.3, pytest.param(0.7, marks=EXHAUSTIVE)])
def test_auto_checkpointing_reaches_its_memory_budget(
    strategy: tuple[str, ...], fraction: float, run_job: JobRunner
) -> None:
    max_bytes, min_bytes = (
        peak_memory.worst_rank_breakdown(compose((*BLOCKS, *strategy, f"memory={option}"))).peak
        for option in ("none", "checkpoint_full")
    )
    budget = (min_bytes + fraction * (max_bytes - min_bytes)) / GIB
    budgeted_run = run_job.without_defaults(
        *BLOCKS, *strategy, "memory=auto", f"memory.budget_gib={budget}"
    )
    peak = budgeted_run.summary["metrics"]["memory/peak_bytes"] / GIB
    print(f"{budget:.4f} GiB allowed, {peak:.4f} taken: {budgeted_run.resolved['memory']}")
    assert 0.9 * budget < peak < 1.02 * budget


UNSHARDED_WEIGHTS = ZERO[8][:-1]
"""ZeRO-3 with the default ``keep_whole_below``, above the size of each weight."""


@needs_deepspeed
@pytest.mark.parametrize(
    "overrides",
    [
        *ZERO[::4],
        *(
            pytest.param(case_overrides, marks=EXHAUSTIVE)
            for case_overrides in (*ZERO, UNSHARDED_WEIGHTS)
            if case_overrides not in ZERO[::4]
        ),
    ],
    ids=" ".join,
)
def test_zero_peak_memory_is_near_prediction(
    overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    predicted = peak_memory.worst_rank_breakdown(compose((*SMALL, *overrides)))
    peak_bytes = run_job.without_defaults(*SMALL, *overrides).summary["metrics"][
        "memory/peak_bytes"
    ]
    error = predicted.peak / peak_bytes - 1
    print(f"{' '.join(overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.025


@needs_deepspeed
@pytest.mark.parametrize(
    "overrides",
    [ZERO[9], *(pytest.param(case, marks=EXHAUSTIVE) for case in (ZERO[0], ZERO[6], ZERO[8]))],
    ids=" ".join,
)
def test_average_of_zero_masters_adds_the_predicted_memory(
    overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    averaged = (*SMALL, *overrides, EMA)
    predicted = peak_memory.worst_rank_breakdown(compose(averaged)).peak
    default = peak_memory.worst_rank_breakdown(compose((*SMALL, *overrides))).peak
    measured, default_measured = (
        run_job.without_defaults(*case).summary["metrics"]["memory/peak_bytes"]
        for case in (averaged, (*SMALL, *overrides))
    )
    print(f"{' '.join(overrides)}: {predicted / measured - 1:+.2%}")
    assert predicted == pytest.approx(measured, rel=0.025)
    assert predicted - default == pytest.approx(measured - default_measured, rel=0.01)
