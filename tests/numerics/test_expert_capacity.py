"""Capacity of experts: a loop over tokens, dropless routing and one device as references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.decoder_configs import EXACT_TOLERANCE, LLAMA
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, SGD, assert_same_training
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks, mesh
from torch import Tensor
from torch.nn import functional as F

from scalewise import compose
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.moe import MixtureOfExperts, find_mixtures
from scalewise.planner import peak_memory

EXHAUSTIVE = pytest.mark.exhaustive
EXPERTS = replace(LLAMA, experts=6, expert_dim=24, initial_std=0.3, capacity_factor=0.8)


def mixture_of(spec: DecoderConfig) -> MixtureOfExperts:
    first, *_ = find_mixtures(build_model(spec, 0))
    return first.train()


def loop_over_tokens(mixture: MixtureOfExperts, x_BTW: Tensor, capacity: int) -> tuple[Tensor, int]:
    """Output and number of dropped pairs, with one token and one expert at a time."""
    spec = mixture.spec
    gate, up, down = (
        getattr(mixture.experts, name).weight.unflatten(0, (spec.routed_experts, -1))
        for name in ("gate", "up", "down")
    )
    taken, dropped = [0] * spec.routed_experts, 0
    outputs = []
    for x in x_BTW.flatten(0, 1):
        scores = (mixture.router.weight @ x).softmax(-1)
        picked, chosen = scores.topk(spec.experts_per_token)
        output = torch.zeros_like(x) if mixture.shared is None else mixture.shared(x)
        for score, expert in zip(picked / picked.sum(), chosen.tolist(), strict=True):
            if taken[expert] == capacity:
                dropped += 1
                continue
            taken[expert] += 1
            hidden = F.silu(gate[expert] @ x) * (up[expert] @ x)
            output = output + score * (down[expert] @ hidden)
        outputs.append(output)
    return torch.stack(outputs).view_as(x_BTW), dropped


@pytest.mark.parametrize(
    ("spec", "capacity"),
    [
        (EXPERTS, 6),
        (replace(EXPERTS, experts_per_token=1, capacity_factor=1.0), 4),
        (replace(EXPERTS, shared_experts=1, experts_per_token=3, capacity_factor=0.2), 3),
    ],
    ids=["top-2", "switch", "shared"],
)
def test_experts_take_tokens_up_to_their_capacity(spec: DecoderConfig, capacity: int) -> None:
    mixture = mixture_of(spec)
    x = torch.randn(2, 11, spec.width, requires_grad=True)
    assert spec.expert_capacity(22) == capacity
    parameters = list(mixture.parameters())
    expected, dropped = loop_over_tokens(mixture, x, capacity)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), [x, *parameters])
    actual = mixture(x)
    gradients = torch.autograd.grad((actual * direction).sum(), [x, *parameters])
    torch.testing.assert_close(actual, expected, **EXACT_TOLERANCE)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, **EXACT_TOLERANCE)
    assert dropped > 0
    assert mixture.dropped is not None
    assert int(mixture.dropped) == int(mixture.counts[-1]) == dropped
    assert int(mixture.load.sum()) == 22 * spec.experts_per_token
    mixture.reset_counts()
    assert mixture.counts.count_nonzero() == 0


@pytest.mark.parametrize("factor", [3.0, 100.0])
def test_large_capacity_equals_dropless_routing(factor: float) -> None:
    """With a factor of ``experts / experts_per_token``, an expert can take all tokens."""
    limited = mixture_of(replace(EXPERTS, capacity_factor=factor))
    dropless = mixture_of(replace(EXPERTS, capacity_factor=None))
    x = torch.randn(2, 11, EXPERTS.width)
    outputs = [mixture(x) for mixture in (limited, dropless)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(mixture.parameters()))
        for output, mixture in zip(outputs, (limited, dropless), strict=True)
    ]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert limited.dropped is not None
    assert int(limited.dropped) == 0


def test_validation_drops_no_token() -> None:
    limited, dropless = (
        mixture_of(replace(EXPERTS, capacity_factor=factor)) for factor in (0.1, None)
    )
    x = torch.randn(2, 11, EXPERTS.width)
    with torch.no_grad():
        assert torch.equal(limited.eval()(x), dropless.eval()(x))
        assert limited.dropped is not None
        assert int(limited.dropped) == 0
    assert not torch.equal(limited.train()(x), dropless.train()(x))


WITH_EXPERTS = (
    *("model.experts=4", "model.expert_dim=16", "model.shared_experts=1"),
    "model.capacity_factor=0.9",
)
LOSSES = ("model.aux_loss=0.1", "model.router_z_loss=0.01", "model.balance_rate=0.01")
STRATEGY_CASES = {
    "ddp": STRATEGIES["ddp"],
    "fsdp": STRATEGIES["fsdp"],
    "hsdp": mesh(replicate=2, shards=2),
    "pipeline_shards": (
        *mesh(pipeline=2, shards=2),
        *("parallelism.pipeline_micro_batches=2", "trainer.micro_batch=2"),
    ),
    "checkpointing": (*STRATEGIES["fsdp"], "memory=checkpoint_full"),
    "expert": mesh(shards=2, expert=2),
    "expert_shards": mesh(shards=4, expert=2),
    "expert_replicate": mesh(replicate=2, shards=2, expert=2),
    "expert_pipeline": (
        *mesh(pipeline=2, shards=2, expert=2),
        *("parallelism.pipeline_micro_batches=2", "trainer.micro_batch=2"),
    ),
    "expert_tensor": mesh(shards=2, expert=2, tensor=2),
    "expert_tensor_pipeline": (
        *mesh(pipeline=2, shards=2, expert=2, tensor=2),
        *("parallelism.pipeline_micro_batches=2", "trainer.micro_batch=2"),
    ),
    "expert_checkpointing": (*mesh(shards=2, expert=2), "memory=checkpoint_full"),
    "expert_compile": (*mesh(shards=2, expert=2), "compile=block"),
    "deepspeed_zero3": STRATEGIES["deepspeed_zero3"],
}
"""Each forward pass has one sequence, so that a rank has the capacity of one device."""
IN_CI = ("expert_shards",)


def train(run_job: JobRunner, *overrides: str, losses: tuple[str, ...]) -> RunDir:
    base = (*TINY_DECODER, *SGD, *BATCHES["clipped"], *WITH_EXPERTS, *losses)
    return run_job.without_defaults(*base, "trainer.micro_batch=1", *overrides)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(*marks(name), *(() if name in IN_CI else (EXHAUSTIVE,))))
        for name in STRATEGY_CASES
    ],
)
def test_capacity_under_a_strategy_equals_one_device(
    name: str, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    losses = () if "deepspeed" in name else LOSSES
    reference = train(run_job, losses=losses)
    run = train(run_job, *STRATEGY_CASES[name], losses=losses)
    assert_same_training(run, reference)
    dropped = reference.column("experts/dropped")
    assert run.column("experts/dropped") == dropped
    assert min(dropped) > 0
    for key in ("experts/max_load", "experts/min_load", "experts/router_entropy"):
        assert run.column(key) == pytest.approx(reference.column(key), rel=1e-4), key


SIZES = ("model.width=64", "model.heads=4", "trainer.micro_batch=8", "trainer.max_steps=4")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("model.capacity_factor=2",), marks=EXHAUSTIVE),
        pytest.param(("parallelism=fsdp", "parallelism.expert=2"), marks=EXHAUSTIVE),
        pytest.param(mesh(shards=2, expert=2, tensor=2), marks=EXHAUSTIVE),
        pytest.param(("memory=checkpoint_selective",), marks=EXHAUSTIVE),
        pytest.param(("precision=bf16_mixed",), marks=EXHAUSTIVE),
        pytest.param(("adapter=lora", "adapter.targets=[.*]"), marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)
def test_memory_with_capacity_equals_prediction(
    overrides: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    run = (*TINY_DECODER, *WITH_EXPERTS, *LOSSES, *SIZES, *overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(run))
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*run)
    error = predicted.peak / folder.summary["metrics"]["memory/peak_bytes"] - 1
    print(f"{' '.join(overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.01
