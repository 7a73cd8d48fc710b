"""Learning rates, weight decay and multipliers of muP, compared with the table of its paper."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.kinds import ActivationKind, NormKind, PositionKind, QKNorm
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers.config import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    LionConfig,
    PagedAdamWConfig,
)
from scalewise.optimizers.lr_transfer import LRTransfer

RATIO = 4
"""Width relative to the base model."""
DECODER = DecoderConfig(
    vocabulary=64,
    context=16,
    width=128,
    layers=1,
    heads=4,
    feedforward=512,
    norm=NormKind.layernorm,
    position=PositionKind.learned,
    activation=ActivationKind.gelu,
    bias=True,
    head_bias=True,
    qk_norm=QKNorm.head,
    base_width=32,
    base_heads=4,
)
"""Heads four times as wide as in the base model."""
ATTENTION = tuple(f"blocks.0.attention.{name}" for name in ("query", "key", "value", "output"))
FEEDFORWARD = ("blocks.0.feedforward.up", "blocks.0.feedforward.down")
NORMS = ("blocks.0.attention_norm", "blocks.0.feedforward_norm", "norm")
HEAD_NORMS = ("blocks.0.attention.query_norm.weight", "blocks.0.attention.key_norm.weight")
FACTORS = {
    # Input weights, vectors and norms: Adam 1, SGD fan-out. The weight of the head has the SGD rate
    # of its fan-in, and a multiplier of 1/fan-in.
    **dict.fromkeys(("embedding.weight", "position.weight", "head.weight"), (1.0, 4.0)),
    **dict.fromkeys((f"{name}.weight" for name in (*NORMS,)), (1.0, 4.0)),
    **dict.fromkeys((f"{name}.bias" for name in (*NORMS, *ATTENTION, *FEEDFORWARD)), (1.0, 4.0)),
    **dict.fromkeys(HEAD_NORMS, (1.0, 4.0)),
    # Hidden weights: Adam 1/fan-in, SGD 1.
    **dict.fromkeys((f"{name}.weight" for name in (*ATTENTION, *FEEDFORWARD)), (0.25, 1.0)),
    # Neither dimension grows.
    "head.bias": (1.0, 1.0),
}
"""Factors of the learning rates of Adam and of SGD (Yang et al., 2022, table 8, width x 4)."""
ADAM_TYPE = (AdamWConfig, AdamW8bitConfig, AdamW4bitConfig, PagedAdamWConfig, LionConfig)
CASES = [*((cls, 0) for cls in ADAM_TYPE), (SGDConfig, 1)]


@pytest.mark.parametrize(("cls", "column"), CASES)
def test_mup_learning_rates_equal_the_table(cls: type[OptimizerConfig], column: int) -> None:
    optimizer = cls(lr=1.0, weight_decay=0.5, lr_transfer=LRTransfer.mup)
    census = {weight.name: weight for weight in DECODER.weight_census()}
    assert census.keys() == FACTORS.keys()
    for name, factors in FACTORS.items():
        factor = factors[column]
        settings = optimizer.group_settings(census[name])
        decay = 0.5 / factor if len(census[name].shape) == 2 else 0.0
        assert settings == {"lr": factor, "weight_decay": decay}, name


@pytest.mark.parametrize("cls", [*ADAM_TYPE, SGDConfig])
def test_mup_of_the_base_model_changes_no_learning_rate(cls: type[OptimizerConfig]) -> None:
    base, optimizer = replace(DECODER, base_width=128), cls(weight_decay=0.1)
    mup = replace(optimizer, lr_transfer=LRTransfer.mup)
    for weight in base.weight_census():
        assert mup.group_settings(weight) == optimizer.group_settings(weight), weight.name


def test_mup_multiplies_learning_rates_by_name() -> None:
    optimizer = AdamWConfig(
        lr=1.0, lr_factors={"query": 0.1, "embedding": 3.0}, lr_transfer=LRTransfer.mup
    )
    rates = {w.name: optimizer.group_settings(w)["lr"] for w in DECODER.weight_census()}
    assert rates["blocks.0.attention.query.weight"] == pytest.approx(0.1 / RATIO)
    assert rates["embedding.weight"] == 3.0


def test_head_norms_of_more_heads_keep_the_rate_of_sgd() -> None:
    spec = replace(DECODER, heads=16)
    optimizer = SGDConfig(lr=1.0, lr_transfer=LRTransfer.mup)
    rates = {w.name: optimizer.group_settings(w)["lr"] for w in spec.weight_census()}
    assert [rates[name] for name in HEAD_NORMS] == [1.0, 1.0]
    assert rates["norm.weight"] == RATIO


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_attention_scale_of_wider_heads_is_inverse_to_their_width(width: int) -> None:
    spec = replace(DECODER, width=width)
    assert spec.attention_scale == pytest.approx(sqrt(8) / spec.head_size, rel=1e-12)
    scaled = replace(spec, attention_multiplier=0.3)
    assert scaled.attention_scale == pytest.approx(0.3 * 8 / spec.head_size, rel=1e-12)


def test_attention_scale_of_more_heads_is_that_of_the_base_model() -> None:
    for width in (32, 64, 128, 256):
        spec = replace(DECODER, width=width, heads=width // 8)
        assert spec.attention_scale == 1 / sqrt(8), width
        fixed = replace(DECODER, width=width, heads=width // 8, head_width=16)
        assert fixed.attention_scale == 1 / sqrt(16), width


def test_logits_and_initial_matrices_follow_the_width() -> None:
    spec = replace(DECODER, logit_divisor=3.0, initial_std=0.1)
    assert spec.feature_divisor == 3.0 * RATIO
    assert spec.resolved_fields["logit_divisor"] == 3.0 * RATIO
    assert spec.hidden_std == 0.1 / sqrt(RATIO)
    bounded = replace(spec, logit_softcap=2.0)
    assert bounded.feature_divisor == 3.0 * RATIO * 2.0


def test_decoder_without_a_base_model_has_no_factors() -> None:
    spec = replace(DECODER, base_width=None, base_heads=None)
    assert {weight.width_ratio for weight in spec.weight_census()} == {1.0}
    assert (spec.feature_divisor, spec.hidden_std) == (1.0, spec.initial_std)
    assert spec.attention_scale == 1 / sqrt(spec.head_size)


@pytest.mark.parametrize("heads", [4, 8])
def test_shrunk_decoder_keeps_a_base_model(heads: int) -> None:
    small = replace(DECODER, heads=heads).shrink(1, 32)
    assert (small.width, small.width_ratio, small.head_width_ratio) == (32, 2.0, 2.0)
    assert list(small.validate()) == []
