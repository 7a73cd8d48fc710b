"""Stochastic rounding in training: equal replicas, resume, predicted memory, kept updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import same_weights
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, TINY_DECODER, mesh

from scalewise import compose
from scalewise.bench.memory_accuracy_runs import SMALL
from scalewise.planner import peak_memory
from scalewise.planner.memory_breakdown import StepPhase

EXHAUSTIVE = pytest.mark.exhaustive
ROUNDING = ("precision=bf16_true", "precision.stochastic_rounding=true")
STEPS = (
    *TINY_DECODER,
    *LLAMA,
    *ROUNDING,
    "schedule=constant",
    "schedule.warmup_steps=0",
    "trainer.max_steps=4",
    "trainer.global_batch=8",
    "trainer.micro_batch=2",
    "trainer.log_every=1",
    "trainer.validate_every=null",
)
SHARDS = (
    "trusted_packages=[fixtures]",
    "+callbacks.shards._target_=fixtures.probe_callbacks.WriteShards",
)


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("rounding"), shared_cache)


def shards_by_rank(run_job: JobRunner, *overrides: str) -> list[dict[str, torch.Tensor]]:
    folder = run_job.without_defaults(*STEPS, *SHARDS, *overrides).path
    files = sorted(folder.glob("shards-*.pt"))
    return [torch.load(file) for file in files]


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("sgd", "lion", "adafactor"))],
)
def test_replicas_of_ddp_round_equally(optimizer: str, run_job: JobRunner) -> None:
    first, second = shards_by_rank(run_job, "parallelism=ddp", f"optimizer={optimizer}")
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert same_weights(first, second)


@pytest.mark.parametrize(
    "strategy",
    [mesh(replicate=2), pytest.param(mesh(replicate=2, shards=2), marks=EXHAUSTIVE)],
    ids=" ".join,
)
def test_replicas_of_shards_round_equally(strategy: tuple[str, ...], run_job: JobRunner) -> None:
    shards = shards_by_rank(run_job, *strategy)
    half = len(shards) // 2  # the mesh axes are ordered: replicate, shards
    for first, second in zip(shards[:half], shards[half:], strict=True):
        assert same_weights(first, second)
    if half > 1:
        assert not same_weights(shards[0], shards[1])


def test_training_with_rounding_repeats_and_resumes(run_job: JobRunner) -> None:
    overrides = (*STEPS, "checkpoint.every=2")
    full_run, repeated, other_seed = (
        run_job.without_defaults(*overrides, f"seed={seed}") for seed in (1, 1, 2)
    )
    resumed = run_job.without_defaults(*overrides, "seed=1", resume=full_run.checkpoint(2))
    for run in (repeated, resumed):
        assert run.column("train/loss") == full_run.column("train/loss")
        assert same_weights(run.weights(), full_run.weights())
    assert not same_weights(other_seed.weights(), full_run.weights())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=EXHAUSTIVE)])
def test_rounded_losses_of_a_strategy_are_close_to_one_device(
    strategy: str, run_job: JobRunner
) -> None:
    """Losses of bf16 weights differ by roundings; unlike DDP, shards have other random bits."""
    single, run = (
        run_job.without_defaults(*STEPS, f"parallelism={name}") for name in ("single", strategy)
    )
    assert run.column("train/loss") == pytest.approx(single.column("train/loss"), rel=5e-3)


TALL = (
    "data.sequence=16",
    "model.vocabulary=16384",
    "trainer.micro_batch=1",
    "trainer.global_batch=2",
)
"""Few tokens and one large weight, so that the update of this weight determines the peak."""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer=sgd", "optimizer.momentum=0"),
        ("parallelism=ddp",),
        *(
            pytest.param(case, marks=EXHAUSTIVE)
            for case in (
                ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.nesterov=true"),
                ("optimizer=lion",),
                ("optimizer.fused=false",),
                ("optimizer=adafactor",),
                ("parallelism=fsdp",),
            )
        ),
    ],
    ids=" ".join,
)
def test_peak_memory_with_rounding_equals_prediction(
    overrides: tuple[str, ...], run_job: JobRunner
) -> None:
    case = (*SMALL, *TALL, *ROUNDING, *overrides)
    run = compose(case)
    predicted = peak_memory.worst_rank_breakdown(run)
    assert predicted.peak_phase is StepPhase.optimizer
    metrics = run_job.without_defaults(*case).summary["metrics"]
    error = predicted.peak / metrics["memory/peak_bytes"] - 1
    print(f"{' '.join(overrides)}: {error:+.2%}")
    assert metrics["plan/peak_bytes"] == predicted.peak
    assert abs(error) < 0.01
