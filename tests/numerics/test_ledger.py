"""What the ledger says before a run, beside what is alive in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.jobs import Job
from fixtures.layouts import LAYOUTS

from scalewise import compose
from scalewise.plan import memory

SMALL = (
    "experiment=smoke",
    "tracking=none",
    "callbacks=[none]",
    "data=synthetic",
    "data.sequence=128",
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "model.feedforward=384",
    "model.vocabulary=1024",
    "model.context=128",
    "trainer.max_steps=3",
    "trainer.validate_every=null",
    "trainer.log_every=3",
    "trainer.micro_batch=4",
    "trainer.global_batch=8",
    "schedule.warmup_steps=1",
    "checkpoint=none",
    "launch.isolation=process",
)
WEIGHTS = (
    "model.width=256",
    "model.tied=false",
    "model.vocabulary=256",
    "trainer.micro_batch=1",
    "memory=checkpoint_full",
)
"""A few tokens through larger matrices: weights and gradients decide, not activations."""
MIXED, BF16 = "precision=bf16_mixed", "precision=bf16_true"
FULL, SELECTIVE = "memory=checkpoint_full", "memory=checkpoint_selective"
GPT2 = (
    "model.norm=layernorm",
    "model.position=learned",
    "model.activation=gelu",
    "model.bias=true",
)
CASES = [
    ("single",),
    ("single", MIXED),
    ("single", FULL),
    ("single", SELECTIVE),
    ("single", "optimizer=sgd", "trainer.global_batch=4"),
    ("single", "objective.loss_chunk=64"),
    ("single", *GPT2),
    ("single", *WEIGHTS),
    ("single", MIXED, *WEIGHTS),
    ("single", "adapter=lora", MIXED),
    ("ddp",),
    ("ddp", MIXED, SELECTIVE),
    ("ddp", "optimizer=sgd", "trainer.global_batch=16"),
    ("ddp", *WEIGHTS),
    ("fsdp",),
    ("fsdp", MIXED, SELECTIVE),
    ("fsdp", "adapter=lora"),
    ("fsdp", *WEIGHTS),
    ("fsdp", MIXED, *WEIGHTS),
    ("fsdp_4", *WEIGHTS),
    ("fsdp_zero2", MIXED, *WEIGHTS),
    ("hsdp", *WEIGHTS),
    ("tensor",),
    ("tensor", MIXED, SELECTIVE),
    ("shard_tensor", MIXED, *WEIGHTS),
    ("context", MIXED),
    ("pipeline_gpipe", MIXED, "trainer.micro_batch=8"),
    ("pipeline_one_f_one_b",),
    ("pipeline_shard",),
    ("pipeline_tensor",),
]
SELDOM = [
    ("single", BF16),
    ("fsdp", BF16),
    ("fsdp_kept", *WEIGHTS),
    ("fsdp_prefetch", *WEIGHTS),
    ("tensor", *WEIGHTS),
    ("tensor_alone", MIXED),
    ("context_gather",),
    ("pipeline_gpipe",),
    ("pipeline_one_f_one_b", FULL),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Job:
    return Job(tmp_path_factory.mktemp("ledger"), shared_cache)


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in SELDOM)],
    ids=" ".join,
)
def test_the_peak_is_the_one_foreseen(case: tuple[str, ...], job: Job) -> None:
    layout, *parts = case
    line = (*SMALL, *LAYOUTS.get(layout, ("parallelism=single",)), *parts)
    foreseen = memory.worst(compose(line))
    metrics = job.of(*line).summary["metrics"]
    assert metrics["plan/peak_bytes"] == foreseen.peak
    error = foreseen.peak / metrics["memory/peak_bytes"] - 1
    print(f"{' '.join(case)}: {error:+.2%} at {foreseen.fullest}")
    assert abs(error) < 0.02
