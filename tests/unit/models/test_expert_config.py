"""Configuration of a mixture of experts: parameters, FLOPs and invalid values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalewise.models.base import AttentionFlops
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import ActivationKind
from scalewise.models.decoder.moe_config import EXPERT_OPTIONS

DENSE = DecoderConfig(vocabulary=96, context=64, width=32, layers=3, heads=4, feedforward=48)
EXPERTS = replace(DENSE, experts=8, experts_per_token=2, expert_dim=16, shared_experts=1)


def test_active_parameters_have_the_experts_of_one_token() -> None:
    expert = 3 * 32 * 16
    assert EXPERTS.num_parameters - EXPERTS.active_parameters == 3 * 6 * expert
    assert DENSE.active_parameters == DENSE.num_parameters


def test_flops_count_the_experts_of_one_token() -> None:
    matmuls = sum(
        weight.numel * EXPERTS.token_fraction(weight.name, 64, 0)
        for weight in EXPERTS.weight_census()
        if weight.role not in ("norm", "embedding")
    )
    attention = 3 * AttentionFlops.causal.count(64 * 32)
    assert EXPERTS.flops(64, 0, AttentionFlops.causal) == pytest.approx(6 * matmuls + attention)


def test_every_expert_beyond_one_costs_the_same_as_a_dense_feedforward() -> None:
    wide = replace(DENSE, experts=1, experts_per_token=1)
    router = 6 * 3 * 32
    assert wide.flops(64) == DENSE.flops(64) + router


@pytest.mark.parametrize(
    ("factor", "tokens", "capacity"),
    [(None, 64, None), (1.0, 64, 16), (1.25, 64, 20), (1.0, 10, 3), (0.01, 64, 1), (9.0, 64, 64)],
)
def test_capacity_is_a_factor_of_the_mean_load(
    factor: float | None, tokens: int, capacity: int | None
) -> None:
    spec = replace(EXPERTS, capacity_factor=factor)
    assert spec.expert_capacity(tokens) == capacity


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"experts": 0}, "model.experts", "set model.experts=2"),
        ({"experts_per_token": 9}, "model.experts_per_token", "set model.experts_per_token=8"),
        ({"expert_dim": -1}, "model.expert_dim", "set model.expert_dim=2"),
        ({"aux_loss": -0.1}, "model.aux_loss", "set model.aux_loss=0"),
        (
            {"capacity_factor": 0.0},
            "model.capacity_factor",
            "set model.capacity_factor=1.25, or model.capacity_factor=null",
        ),
        ({"shared_experts": -1}, "model.shared_experts", "set model.shared_experts=0"),
        ({"bias": True}, "model.bias", "set model.bias=false"),
        ({"activation": ActivationKind.gelu}, "model.activation", "set model.activation=swiglu"),
    ],
    ids=str,
)
def test_invalid_experts_are_rejected(values: dict[str, object], key: str, fix: str) -> None:
    issues = list(replace(EXPERTS, **values).validate())  # type: ignore[arg-type]  # by name
    assert [(issue.key, issue.fix) for issue in issues] == [(key, fix)]


@pytest.mark.parametrize("name", EXPERT_OPTIONS)
def test_options_of_experts_require_experts(name: str) -> None:
    spec = replace(DENSE, **dict.fromkeys([name], 1.5))  # type: ignore[arg-type]  # by name
    keys = [issue.key for issue in spec.validate()]
    assert keys == [f"model.{name}"]
