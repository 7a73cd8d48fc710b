"""Mixtures of experts under parallelism strategies: equality, checkpoints and planned memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, SGD, ReferenceRun, assert_same_training
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks, mesh

from scalewise import compose
from scalewise.planner import peak_memory

WITH_EXPERTS = ("model.experts=4", "model.expert_dim=16", "model.shared_experts=1")
LOSSES = ("model.aux_loss=0.1", "model.router_z_loss=0.01", "model.balance_rate=0.01")
PER_TOKEN_LOSSES = LOSSES[1:]
"""Losses that need no whole sequence, of which context ranks have a part."""
EXHAUSTIVE = pytest.mark.exhaustive
EXPERT_TENSOR = mesh(shards=2, expert=2, tensor=2)
PIPELINE_EXPERT_TENSOR = mesh(pipeline=2, context=2, expert=2, tensor=2)
EQUAL_STRATEGIES = {
    "ddp": (STRATEGIES["ddp"], 2, LOSSES),
    "fsdp": (STRATEGIES["fsdp"], 2, LOSSES),
    "fsdp_zero1": (STRATEGIES["fsdp_zero1"], 2, LOSSES),
    "hsdp": (mesh(replicate=2, shards=2), 1, LOSSES),
    "pipeline_shards": (mesh(pipeline=2, shards=2), 2, LOSSES),
    "zero_bubble": (STRATEGIES["pipeline_zbv_zero_bubble"], 4, LOSSES),
    "checkpointing": (("parallelism=fsdp", "memory=checkpoint_full"), 2, LOSSES),
    "context": (STRATEGIES["context"], 4, PER_TOKEN_LOSSES),
    "expert": (mesh(shards=2, expert=2), 2, LOSSES),
    "expert_shards": (mesh(shards=4, expert=2), 1, LOSSES),
    "expert_replicate": (mesh(replicate=2, shards=2, expert=2), 1, LOSSES),
    "expert_hsdp": (mesh(replicate=2, shards=2, context=2, expert=2), 1, ()),
    "expert_context": (mesh(context=2, expert=2), 4, PER_TOKEN_LOSSES),
    "expert_shards_context": (mesh(shards=2, context=2, expert=4), 2, ()),
    "expert_pipeline": (mesh(pipeline=2, shards=2, expert=2), 2, LOSSES),
    "expert_zero_bubble": (
        (*mesh(pipeline=2, context=2, expert=2), "parallelism.pipeline_schedule=zbv_zero_bubble"),
        4,
        (),
    ),
    "expert_zero1": ((*mesh(shards=2, expert=2), "parallelism.shard=optimizer"), 2, LOSSES),
    "expert_offload": ((*mesh(shards=2, expert=2), "parallelism.cpu_offload=true"), 2, LOSSES),
    "expert_checkpointing": ((*mesh(shards=2, expert=2), "memory=checkpoint_full"), 2, LOSSES),
    "expert_selective": ((*mesh(shards=2, expert=2), "memory=checkpoint_selective"), 2, LOSSES),
    "expert_compile": ((*mesh(shards=2, expert=2), "compile=block"), 2, LOSSES),
    "tensor": (STRATEGIES["tensor"], 4, LOSSES),
    "tensor_no_sequence_parallel": (STRATEGIES["tensor_no_sequence_parallel"], 4, LOSSES),
    "tensor_checkpointing": ((*STRATEGIES["tensor"], "memory=checkpoint_full"), 4, LOSSES),
    "tensor_selective": ((*STRATEGIES["tensor"], "memory=checkpoint_selective"), 4, LOSSES),
    "tensor_shards": (mesh(shards=2, tensor=2), 2, LOSSES),
    "tensor_replicate": (mesh(replicate=2, tensor=2), 2, LOSSES),
    "tensor_hsdp": (mesh(replicate=2, shards=2, tensor=2), 1, LOSSES),
    "tensor_zero1": ((*mesh(shards=2, tensor=2), "parallelism.shard=optimizer"), 2, LOSSES),
    "tensor_offload": ((*mesh(shards=2, tensor=2), "parallelism.cpu_offload=true"), 2, LOSSES),
    "tensor_context": (mesh(context=2, tensor=2), 4, PER_TOKEN_LOSSES),
    "tensor_dense_layers": (
        mesh(shards=2, tensor=2),
        2,
        (*LOSSES, "model.dense_layers=1", "model.shared_experts=0"),
    ),
    "tensor_capacity": (
        STRATEGIES["tensor"],
        12,
        (*LOSSES, "model.capacity_factor=0.5"),
    ),
    "tensor_pipeline": (mesh(pipeline=2, tensor=2), 4, LOSSES),
    "tensor_zero_bubble": (
        (*mesh(pipeline=2, tensor=2), "parallelism.pipeline_schedule=zbv_zero_bubble"),
        4,
        LOSSES,
    ),
    "expert_tensor": (EXPERT_TENSOR, 2, LOSSES),
    "expert_tensor_one_expert": (
        EXPERT_TENSOR,
        2,
        (*LOSSES, "model.experts=2", "model.shared_experts=0"),
    ),
    "expert_tensor_shards": (mesh(shards=4, expert=2, tensor=2), 1, LOSSES),
    "expert_tensor_hsdp": (mesh(replicate=2, shards=2, expert=2, tensor=2), 1, LOSSES),
    "expert_tensor_context": (mesh(context=2, expert=2, tensor=2), 4, PER_TOKEN_LOSSES),
    "expert_tensor_shards_context": (
        mesh(shards=2, context=2, expert=2, tensor=2),
        2,
        PER_TOKEN_LOSSES,
    ),
    "expert_tensor_pipeline": (mesh(pipeline=2, shards=2, expert=2, tensor=2), 2, LOSSES),
    "expert_tensor_interleaved": (
        (
            *PIPELINE_EXPERT_TENSOR,
            "parallelism.pipeline_schedule=interleaved_1f1b",
        ),
        4,
        PER_TOKEN_LOSSES,
    ),
    "expert_tensor_zero_bubble": (
        (
            *PIPELINE_EXPERT_TENSOR,
            "parallelism.pipeline_schedule=zbv_zero_bubble",
        ),
        4,
        (),
    ),
    "expert_tensor_no_sequence_parallel": (
        (*EXPERT_TENSOR, "parallelism.sequence_parallel=false"),
        2,
        LOSSES,
    ),
    "expert_tensor_zero1": (
        (*mesh(shards=4, expert=2, tensor=2), "parallelism.shard=optimizer"),
        1,
        LOSSES,
    ),
    "expert_tensor_offload": (
        (*EXPERT_TENSOR, "parallelism.cpu_offload=true"),
        2,
        LOSSES,
    ),
    "expert_tensor_checkpointing": (
        (*EXPERT_TENSOR, "memory=checkpoint_full"),
        2,
        LOSSES,
    ),
    "expert_tensor_selective": (
        (*EXPERT_TENSOR, "memory=checkpoint_selective"),
        2,
        LOSSES,
    ),
    "expert_tensor_dense_layers": (
        EXPERT_TENSOR,
        2,
        (*LOSSES, "model.dense_layers=1", "model.shared_experts=0"),
    ),
    "deepspeed_zero2": (STRATEGIES["deepspeed_zero2"], 2, ()),
    "deepspeed_zero3": (STRATEGIES["deepspeed_zero3"], 2, ()),
}
"""Strategies with the micro-batch size, three of which are a step, and losses of the router."""
IN_CI = ("pipeline_shards", "expert_shards", "tensor_shards", "expert_tensor")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(*marks(name), *(() if name in IN_CI else (EXHAUSTIVE,))))
        for name in EQUAL_STRATEGIES
    ],
)
def test_experts_under_a_strategy_equal_one_device(
    name: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    strategy, micro_batch, losses = EQUAL_STRATEGIES[name]
    experts = (*WITH_EXPERTS, *losses)
    run = JobRunner(tmp_path, shared_cache).without_defaults(
        *TINY_DECODER,
        *SGD,
        *BATCHES["clipped"],
        *strategy,
        *experts,
        f"trainer.micro_batch={micro_batch}",
    )
    reference = reference_run("clipped", *experts)
    assert_same_training(run, reference)
    for key in ("experts/max_load", "experts/min_load", "experts/router_entropy"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=1e-4), key


LARGE_EXPERTS = ("model.expert_dim=512", "model.feedforward=512")
"""Experts whose weights and gradients need more memory than the activations."""
ONE_DEVICE = ("trainer.micro_batch=12",)
ON_TWO_RANKS = (*mesh(shards=2, expert=2), "trainer.micro_batch=3")
TENSOR_SHARDS = (*mesh(shards=2, tensor=2), "trainer.micro_batch=6")
ON_EXPERT_TENSOR_RANKS = (*EXPERT_TENSOR, "trainer.micro_batch=6")
ON_FOUR_RANKS = (*mesh(shards=4, expert=2), "trainer.micro_batch=3")
EXPERT_TENSOR_SHARDS = (*mesh(shards=4, expert=2, tensor=2), "trainer.micro_batch=3")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE_DEVICE, (*STRATEGIES["ddp"], "trainer.micro_batch=2")),
        (ONE_DEVICE, (*STRATEGIES["fsdp"], "trainer.micro_batch=2")),
        (ONE_DEVICE, (*STRATEGIES["pipeline_one_f_one_b"], "trainer.micro_batch=2")),
        (ONE_DEVICE, ON_FOUR_RANKS),
        (ON_FOUR_RANKS, ONE_DEVICE),
        (ONE_DEVICE, (*STRATEGIES["tensor"], "trainer.micro_batch=4")),
        ((*STRATEGIES["tensor"], "trainer.micro_batch=4"), ONE_DEVICE),
        (TENSOR_SHARDS, ONE_DEVICE),
        (ON_FOUR_RANKS, TENSOR_SHARDS),
        (ON_FOUR_RANKS, ON_TWO_RANKS),
        (ON_TWO_RANKS, (*mesh(pipeline=2, shards=2), "trainer.micro_batch=2")),
        (ONE_DEVICE, ON_EXPERT_TENSOR_RANKS),
        (ON_EXPERT_TENSOR_RANKS, ONE_DEVICE),
        (ON_EXPERT_TENSOR_RANKS, TENSOR_SHARDS),
        (ON_TWO_RANKS, ON_EXPERT_TENSOR_RANKS),
        (EXPERT_TENSOR_SHARDS, ON_TWO_RANKS),
        (ON_EXPERT_TENSOR_RANKS, EXPERT_TENSOR_SHARDS),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_checkpoints_with_experts_resume_under_another_strategy(
    first: tuple[str, ...],
    second: tuple[str, ...],
    optimizer: str,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    """Biases of the choice are part of a checkpoint."""
    run_job = JobRunner(tmp_path, shared_cache)
    train = (*TINY_DECODER, *SGD[:-2], *BATCHES["clipped"], *WITH_EXPERTS, *LOSSES)
    train = (*train, "trainer.max_steps=4", "trainer.validate_every=null", "checkpoint.every=2")
    if optimizer == "adamw":
        train = (*(it for it in train if not it.startswith("optimizer")), "optimizer=adamw")
    full_run = run_job.without_defaults(*train, *first)
    resumed = run_job.without_defaults(*train, *second, resume=full_run.checkpoint(2))
    assert resumed.column("train/loss") == pytest.approx(full_run.column("train/loss"), rel=1e-5)
    expected, actual = full_run.weights(), resumed.weights()
    biases = [name for name in expected if name.endswith("feedforward.bias")]
    assert len(biases) == 4
    assert any(expected[name].abs().max() > 0 for name in biases)
    for name in biases:
        assert torch.equal(actual[name], expected[name]), name


EXPERT_TENSOR_MEMORY: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"shards": 2}, ()),
    ({"shards": 2}, LARGE_EXPERTS),
    ({"shards": 2}, ("precision=bf16_mixed",)),
    ({"shards": 2}, ("memory=checkpoint_full",)),
    ({"shards": 2}, ("memory=checkpoint_selective",)),
    ({"shards": 2}, ("parallelism.sequence_parallel=false",)),
    ({"shards": 2}, (*LARGE_EXPERTS, "model.dense_layers=1")),
    ({"shards": 4}, LARGE_EXPERTS),
    ({"shards": 4}, (*LARGE_EXPERTS, "precision=bf16_mixed")),
    ({"context": 2}, ("model.aux_loss=0",)),
    ({"pipeline": 2, "shards": 2}, LARGE_EXPERTS),
    ({"replicate": 2, "shards": 2}, LARGE_EXPERTS),
)
"""Axes and options of plans with expert and tensor parallelism. With a capacity that no load
exceeds, sizes do not depend on the router."""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("parallelism=fsdp",), marks=EXHAUSTIVE),
        pytest.param(("memory=checkpoint_selective",), marks=EXHAUSTIVE),
        pytest.param(("precision=bf16_mixed",), marks=EXHAUSTIVE),
        pytest.param(("adapter=lora",), marks=EXHAUSTIVE),
        ("parallelism=tensor",),
        *(
            pytest.param(overrides, marks=EXHAUSTIVE)
            for overrides in (
                ("parallelism=tensor", "precision=bf16_mixed"),
                ("parallelism=tensor", "memory=checkpoint_full"),
                ("parallelism=tensor", "memory=checkpoint_selective"),
                ("parallelism=tensor", "parallelism.sequence_parallel=false"),
                ("parallelism=tensor", *LARGE_EXPERTS),
                mesh(shards=2, tensor=2),
                (*mesh(shards=2, tensor=2), *LARGE_EXPERTS),
                (*mesh(shards=2, tensor=2), *LARGE_EXPERTS, "precision=bf16_mixed"),
                mesh(replicate=2, tensor=2),
                mesh(pipeline=2, tensor=2),
                ("parallelism=tensor", "model.dense_layers=1"),
                (*mesh(shards=2, tensor=2), *LARGE_EXPERTS, "model.dense_layers=1"),
                (*mesh(shards=2, expert=2), "model.capacity_factor=2.0", "model.dense_layers=1"),
                *(
                    (*mesh(**sizes, expert=2, tensor=2), "model.capacity_factor=2.0", *options)
                    for sizes, options in EXPERT_TENSOR_MEMORY
                ),
            )
        ),
    ],
    ids=" ".join,
)
def test_memory_with_experts_equals_prediction(
    overrides: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    sizes = ("model.width=64", "model.heads=4", "trainer.micro_batch=8", "trainer.max_steps=4")
    run = (*TINY_DECODER, *WITH_EXPERTS, *LOSSES, *sizes, *overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(run))
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*run)
    error = predicted.peak / folder.summary["metrics"]["memory/peak_bytes"] - 1
    assert abs(error) < 0.02, f"{error:+.2%} at {predicted.peak_phase}"
    assert all(1 <= load < 4 for load in folder.column("experts/max_load"))
    assert all(0 <= load <= 1 for load in folder.column("experts/min_load"))
    assert folder.column("experts/router_entropy")[0] == pytest.approx(math.log(4), abs=0.1)
