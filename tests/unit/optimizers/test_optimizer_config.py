"""Optimizer configs: state bytes, parameter groups, incompatible strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from fixtures.cli_runner import UNTRACKED
from fixtures.strategies import STRATEGIES, TINY_DECODER

from scalewise import ConfigError, compose
from scalewise.models.base import Weight
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers.build import build_parameter_groups
from scalewise.optimizers.config import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeConfig,
)

MATRIX = Weight("blocks.0.attention.query.weight", (64, 128), "attention", 0)
TABLE = Weight("embedding.weight", (64, 128), "embedding")
NORM = Weight("blocks.0.norm.weight", (128,), "norm", 0)
NUM_ELEMENTS = 64 * 128


@pytest.mark.parametrize(
    ("optimizer", "weight", "shards", "state"),
    [
        (SGDConfig(), MATRIX, 1, 4 * NUM_ELEMENTS),
        (SGDConfig(momentum=0.0), MATRIX, 1, 0),
        (LionConfig(), MATRIX, 1, 4 * NUM_ELEMENTS),
        (AdamWConfig(), MATRIX, 1, 8 * NUM_ELEMENTS),
        (
            AdamWConfig(),
            MATRIX,
            3,
            8 * 22 * 128,
        ),  # the first of three ranks has one row more than the last
        (ScheduleFreeConfig(), MATRIX, 1, 8 * NUM_ELEMENTS),
        (AdamW8bitConfig(), MATRIX, 1, 2 * (NUM_ELEMENTS + NUM_ELEMENTS // 256 * 4 + 256 * 4)),
        (
            AdamW8bitConfig(),
            MATRIX,
            4,
            8 * NUM_ELEMENTS // 4,
        ),  # tensors below 4096 elements are not quantized
        (AdamW4bitConfig(), MATRIX, 1, 2 * (NUM_ELEMENTS // 2 + NUM_ELEMENTS // 128 * 4 + 16 * 4)),
        (AdamW4bitConfig(), NORM, 1, 8 * 128),
        (AdafactorConfig(), MATRIX, 1, 4 * (64 + 128)),
        (AdafactorConfig(), NORM, 1, 4 * 128),
        (MuonConfig(), MATRIX, 1, 4 * NUM_ELEMENTS),
        (MuonConfig(), TABLE, 1, 8 * NUM_ELEMENTS),
        (MuonConfig(), NORM, 1, 8 * 128),
    ],
)
def test_optimizer_state_bytes_are_counted(
    optimizer: OptimizerConfig, weight: Weight, shards: int, state: int
) -> None:
    assert optimizer.state_bytes(weight, shards, 4) == state


@dataclass(eq=False)
class Parameter:
    """Parameter of a group, without torch."""

    requires_grad: bool = True


def test_parameter_groups_match_by_name() -> None:
    optimizer = AdamWConfig(
        lr=1.0, weight_decay=0.1, lr_factors={"embed": 0.5}, no_decay=("query",)
    )
    frozen = Parameter(requires_grad=False)
    parameters = {weight: Parameter() for weight in (MATRIX, TABLE, NORM)}
    groups = build_parameter_groups(optimizer, cast(Any, [*parameters.items(), (MATRIX, frozen)]))
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1.0, 0.0), (0.5, 0.1)]
    assert groups[0]["params"] == [parameters[MATRIX], parameters[NORM]]
    assert groups[1]["params"] == [parameters[TABLE]]


def test_parameter_group_factors_multiply() -> None:
    optimizer = AdamWConfig(lr=1.0, lr_factors={"embed": 0.5, "weight$": 0.1})
    assert optimizer.group_settings(TABLE)["lr"] == pytest.approx(0.05)
    assert optimizer.group_settings(MATRIX)["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("+optimizer.lr_factors={embeding: 0.1}", "optimizer.lr_factors", "matches no name"),
        ("+optimizer.lr_factors={embedding: -1.0}", "lr_factors.embedding", "must be 0 or more"),
        ("optimizer.no_decay=['(']", "optimizer.no_decay", "is not a valid regular"),
        ("optimizer.no_decay=[nothing]", "optimizer.no_decay", "matches no name"),
        ("+optimizer.lr_factors.embedding=fast", "optimizer", "fast"),
        ("optimizer.lr_factors.embedding=0.1", "lr_factors.embedding", "+optimizer.lr_factors."),
        ("optimizer.lr_factors={embedding: 0.1}", "optimizer.lr_factors", "+optimizer.lr_factors="),
    ],
)
def test_pattern_without_effect_is_rejected(override: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose([*UNTRACKED, override])
    assert key in str(excinfo.value)
    assert message in str(excinfo.value)


def test_patterns_are_set_on_the_command_line() -> None:
    run = compose([*UNTRACKED, "+optimizer.lr_factors.embedding=0.1", "optimizer.no_decay=[norm]"])
    assert run.optimizer.lr_factors == {"embedding": 0.1}
    assert run.optimizer.no_decay == ("norm",)
    assert run.optimizer.group_settings(TABLE)["lr"] == pytest.approx(run.optimizer.lr * 0.1)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "reason"),
    [
        ("muon", "fsdp_offload", "requires unsharded parameters"),
        ("muon", "tensor", "requires unsharded parameters"),
        ("adafactor", "context", "requires unsharded parameters"),
        ("adamw_paged", "fsdp", "requires unsharded parameters"),
        ("muon", "deepspeed_zero1", "requires unsharded parameters"),
        ("adamw_8bit", "deepspeed_zero2", "updates one flat vector"),
        ("schedule_free", "deepspeed_zero3", "updates one flat vector"),
    ],
)
def test_optimizer_rejects_incompatible_strategy(
    optimizer: str, strategy: str, reason: str
) -> None:
    strategy_overrides = STRATEGIES.get(strategy, (f"parallelism={strategy}",))
    with pytest.raises(ConfigError) as excinfo:
        compose([*TINY_DECODER, *strategy_overrides, f"optimizer={optimizer}", "schedule=constant"])
    assert [c.key for c in excinfo.value.issues] == ["optimizer"]
    assert reason in str(excinfo.value)


def test_schedule_free_requires_a_constant_schedule() -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose([*UNTRACKED, "optimizer=schedule_free", "schedule=cosine"])
    assert "schedule=constant" in str(excinfo.value)
