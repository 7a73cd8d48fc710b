"""Mixture of experts: routing, losses of the router, and logits of transformers."""

from __future__ import annotations

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
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scalewise.errors import ConfigError
from scalewise.models.build import build_model
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.moe import ENTROPY_UNIT, MixtureOfExperts, find_mixtures
from scalewise.models.decoder.moe_config import RouterScore
from scalewise.models.decoder.state_dict_adapter import export_folder
from scalewise.models.grouped_mm import grouped_mm

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
