"""Mixture of experts: routing, losses of the router, and parallelism strategies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.decoder_configs import (
    EXACT_TOLERANCE,
    EXPERT_DECODERS,
    LLAMA,
    hf_model,
    random_tokens,
)
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, SGD, ReferenceRun, assert_same_training
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks, mesh
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scalewise import compose
from scalewise.errors import ConfigError
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.moe import ENTROPY_UNIT, MixtureOfExperts, find_mixtures
from scalewise.models.decoder.moe_config import RouterScore
from scalewise.models.decoder.state_dict_adapter import export_folder
from scalewise.models.grouped_mm import grouped_mm
from scalewise.planner import peak_memory

EXPERTS = replace(LLAMA, experts=6, expert_dim=24, initial_std=0.3)


def mixture_of(spec: DecoderConfig) -> MixtureOfExperts:
    first, *_ = find_mixtures(build_model(spec, 0))
    return first


def loop_over_experts(mixture: MixtureOfExperts, x_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, router logits and experts of tokens, written independently of the module."""
    spec, weights = mixture.spec, mixture.experts
    logits = x_BTW @ mixture.router.weight.T
    softmax = spec.router_score is RouterScore.softmax
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    bias = 0 if mixture.bias is None else mixture.bias
    chosen = (scores + bias).topk(spec.experts_per_token).indices
    total = torch.zeros_like(x_BTW)
    gate, up, down = (
        matrices.weight.unflatten(0, (spec.routed_experts, -1))
        for matrices in (weights.gate, weights.up, weights.down)
    )
    picked = scores.gather(-1, chosen)
    divisor = picked.sum(-1) if spec.norm_topk else torch.ones(())
    for expert in range(spec.routed_experts):
        output = (F.silu(x_BTW @ gate[expert].T) * (x_BTW @ up[expert].T)) @ down[expert].T
        weight = scores[..., expert] * (chosen == expert).any(-1) / divisor
        total = total + weight[..., None] * output
    if mixture.shared is not None:
        total = total + mixture.shared(x_BTW)
    return total, logits, chosen


@pytest.mark.parametrize(
    "spec",
    [
        EXPERTS,
        replace(EXPERTS, experts_per_token=1, norm_topk=False),
        replace(EXPERTS, shared_experts=2, experts_per_token=3),
        replace(EXPERTS, router_score=RouterScore.sigmoid, balance_rate=0.1),
    ],
    ids=["mixtral", "switch", "shared", "deepseek"],
)
def test_experts_equal_a_loop_over_experts(spec: DecoderConfig) -> None:
    mixture = mixture_of(spec)
    if mixture.bias is not None:
        mixture.bias += torch.linspace(-1, 1, spec.routed_experts)
    x = torch.randn(2, 7, spec.width, requires_grad=True)
    parameters = list(mixture.parameters())
    expected, *_ = loop_over_experts(mixture, x)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), [x, *parameters])
    actual = mixture(x)
    gradients = torch.autograd.grad((actual * direction).sum(), [x, *parameters])
    torch.testing.assert_close(actual, expected, **EXACT_TOLERANCE)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, **EXACT_TOLERANCE)


@pytest.mark.parametrize("spec", EXPERT_DECODERS.values(), ids=EXPERT_DECODERS.keys())
def test_experts_load_from_transformers_and_export_to_it(
    spec: DecoderConfig, tmp_path: Path
) -> None:
    reference, tokens = hf_model(spec), random_tokens(spec)
    reference.save_pretrained(tmp_path / "from")
    loaded = replace(spec, weights=str(tmp_path / "from"))
    assert not list(loaded.validate())
    decoder = build_model(loaded, 0).eval()
    export_folder(decoder.state_dict(), spec, tmp_path / "to")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "to").eval()
    with torch.no_grad():
        logits = decoder(tokens)
        for model in (reference, exported):
            torch.testing.assert_close(logits, model(tokens).logits, **EXACT_TOLERANCE)


@pytest.mark.parametrize("spec", EXPERT_DECODERS.values(), ids=EXPERT_DECODERS.keys())
def test_packed_texts_have_the_logits_of_transformers_with_experts(
    spec: DecoderConfig, tmp_path: Path
) -> None:
    reference, tokens, lengths = hf_model(spec), random_tokens(spec), (20, 28)
    reference.save_pretrained(tmp_path)
    decoder = build_model(replace(spec, weights=str(tmp_path)), 0).eval()
    positions_BS = torch.cat([torch.arange(length) for length in lengths]).expand(len(tokens), -1)
    with torch.no_grad():
        texts = [reference(text).logits for text in tokens.split(lengths, 1)]
        logits = decoder(tokens, positions_BS=positions_BS)
    torch.testing.assert_close(logits, torch.cat(texts, 1), **EXACT_TOLERANCE)


def test_balanced_experts_have_no_architecture_of_transformers(tmp_path: Path) -> None:
    spec = replace(EXPERTS, balance_rate=0.001)
    with pytest.raises(ConfigError, match="is not supported by Hugging Face's Mixtral"):
        export_folder(build_model(spec, 0).state_dict(), spec, tmp_path / "out")


def test_grouped_mm_leaves_empty_groups_without_gradient() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    weight = torch.randn(4, 2, 3, requires_grad=True)
    y = grouped_mm(x, weight, torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert torch.equal(y, torch.cat([x[:2] @ weight[1].T, x[2:] @ weight[3].T]))
    y.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad[[0, 2]].abs().max() == 0
    assert weight.grad[[1, 3]].abs().min() > 0


@pytest.mark.parametrize("score", RouterScore)
def test_router_losses_add_their_gradient(score: RouterScore) -> None:
    spec = replace(EXPERTS, aux_loss=0.7, router_z_loss=0.3, router_score=score)
    mixture = mixture_of(spec)
    x = torch.randn(3, 8, spec.width)
    (mixture(x) * 0).sum().backward()
    _, logits, chosen = loop_over_experts(mixture, x)
    scores = logits.softmax(-1) if score is RouterScore.softmax else logits.sigmoid()
    shares = F.one_hot(chosen, spec.routed_experts).float().mean((1, 2))
    means = (scores / scores.sum(-1, keepdim=True)).mean(1)
    aux = spec.routed_experts * (shares * means).sum(-1).mean()
    z_loss = logits.logsumexp(-1).square().mean()
    loss = 0.7 * aux + 0.3 * z_loss
    (expected,) = torch.autograd.grad(loss, [mixture.router.weight])
    torch.testing.assert_close(mixture.router.weight.grad, expected, **EXACT_TOLERANCE)


def test_counts_have_loads_and_entropy() -> None:
    mixture = mixture_of(EXPERTS)
    x = torch.randn(2, 5, EXPERTS.width)
    mixture(x)
    mixture(x)
    _, logits, chosen = loop_over_experts(mixture, x)
    *loads, entropy = mixture.counts.tolist()
    assert loads == [2 * int((chosen == expert).sum()) for expert in range(6)]
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert entropy / ENTROPY_UNIT == pytest.approx(2 * expected.item(), rel=1e-4)


def test_router_losses_are_off_in_validation() -> None:
    mixture = mixture_of(replace(EXPERTS, aux_loss=0.7)).eval()
    with torch.no_grad():
        mixture(torch.randn(1, 4, EXPERTS.width))
    assert mixture.load.sum() == 0


def test_balance_moves_biases_toward_the_mean_load() -> None:
    spec = replace(EXPERTS, balance_rate=0.25)
    module = build_model(spec, 0).train()
    module(random_tokens(spec))
    for mixture in find_mixtures(module):
        load = mixture.load.clone()
        assert load.sum() == 2 * 48 * spec.experts_per_token
        mixture.balance(load)
        assert mixture.bias is not None
        assert torch.equal(mixture.bias, 0.25 * (load.float().mean() - load).sign())


WITH_EXPERTS = ("model.experts=4", "model.expert_dim=16", "model.shared_experts=1")
LOSSES = ("model.aux_loss=0.1", "model.router_z_loss=0.01", "model.balance_rate=0.01")
PER_TOKEN_LOSSES = LOSSES[1:]
"""Losses that need no whole sequence, of which context ranks have a part."""
EXHAUSTIVE = pytest.mark.exhaustive
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
    "expert_tensor": (mesh(shards=2, expert=2, tensor=2), 2, LOSSES),
    "expert_tensor_one_expert": (
        mesh(shards=2, expert=2, tensor=2),
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
            *mesh(pipeline=2, context=2, expert=2, tensor=2),
            "parallelism.pipeline_schedule=interleaved_1f1b",
        ),
        4,
        PER_TOKEN_LOSSES,
    ),
    "expert_tensor_zero_bubble": (
        (
            *mesh(pipeline=2, context=2, expert=2, tensor=2),
            "parallelism.pipeline_schedule=zbv_zero_bubble",
        ),
        4,
        (),
    ),
    "expert_tensor_no_sequence_parallel": (
        (*mesh(shards=2, expert=2, tensor=2), "parallelism.sequence_parallel=false"),
        2,
        LOSSES,
    ),
    "expert_tensor_zero1": (
        (*mesh(shards=4, expert=2, tensor=2), "parallelism.shard=optimizer"),
        1,
        LOSSES,
    ),
    "expert_tensor_offload": (
        (*mesh(shards=2, expert=2, tensor=2), "parallelism.cpu_offload=true"),
        2,
        LOSSES,
    ),
    "expert_tensor_checkpointing": (
        (*mesh(shards=2, expert=2, tensor=2), "memory=checkpoint_full"),
        2,
        LOSSES,
    ),
    "expert_tensor_selective": (
        (*mesh(shards=2, expert=2, tensor=2), "memory=checkpoint_selective"),
        2,
        LOSSES,
    ),
    "expert_tensor_dense_layers": (
        mesh(shards=2, expert=2, tensor=2),
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
ON_FOUR_RANKS = (*mesh(shards=4, expert=2), "trainer.micro_batch=3")
EXPERT_TENSOR = (*mesh(shards=2, expert=2, tensor=2), "trainer.micro_batch=6")
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
        (ONE_DEVICE, EXPERT_TENSOR),
        (EXPERT_TENSOR, ONE_DEVICE),
        (EXPERT_TENSOR, TENSOR_SHARDS),
        (ON_TWO_RANKS, EXPERT_TENSOR),
        (EXPERT_TENSOR_SHARDS, ON_TWO_RANKS),
        (EXPERT_TENSOR, EXPERT_TENSOR_SHARDS),
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
