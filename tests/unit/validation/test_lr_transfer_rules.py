"""Rules between ``optimizer.lr_transfer`` and the other parts of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.hf_checkpoints import RANDOM_LLAMA

from scalewise import compose
from scalewise.errors import ConfigError
from scalewise.validation.lr_transfer_rules import MISSING_RULES

BASE = ("model.base_width=64", "model.base_heads=4")
RUN = ("model=decoder_nano", "data=synthetic", "hardware=cpu")
MUP = (*RUN, *BASE, "optimizer.lr_transfer=mup")
KEY = "optimizer.lr_transfer"
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_4bit", "adamw_paged", "lion", "sgd")
OTHER_OPTIMIZERS = ("adafactor", "muon", "schedule_free")


def rejected(*overrides: str) -> dict[str, str]:
    """Key and fix of each issue of a run."""
    with pytest.raises(ConfigError) as excinfo:
        compose(overrides, check_machine=False)
    return {issue.key: issue.fix for issue in excinfo.value.issues}


@pytest.mark.parametrize(
    "name", ["adamw", "adamw_8bit", "adamw_4bit", "adamw_paged", "lion", "sgd"]
)
def test_mup_is_accepted_for_optimizers_with_a_rule(name: str) -> None:
    run = compose((*MUP, f"optimizer={name}"), check_machine=False)
    assert run.optimizer.update_scale is not None


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_mup_is_rejected_for_optimizers_without_a_rule(name: str) -> None:
    issues = rejected(*MUP, f"optimizer={name}", "schedule=constant")
    assert issues == {KEY: "set optimizer=adamw, or optimizer.lr_transfer=none"}
    assert len(MISSING_RULES) == len(OTHER_OPTIMIZERS)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        ((*RUN, MUP[-1]), KEY, "set model.base_width=128 model.base_heads=4"),
        ((*RUN, *BASE), "model.base_width", "set optimizer.lr_transfer=mup"),
        ((*RUN, MUP[-1], BASE[0]), "model.base_width", "set model.base_heads=4"),
        ((*RUN, MUP[-1], BASE[1]), "model.base_heads", "set model.base_width=128"),
        ((*MUP, "model.base_width=0"), "model.base_width", "set model.base_width=null"),
        ((*MUP, "model.base_heads=-1"), "model.base_heads", "set model.base_heads=null"),
        ((*MUP, "model.base_width=65"), "model.base_width", "set model.base_width=68"),
        ((*MUP, "adapter=lora"), KEY, "set adapter=none"),
        ((*MUP, "model=moe_nano"), "model.base_width", "optimizer.lr_transfer=none"),
        (
            (*MUP, "model.kv_latent_dim=32", "model.rope_head_dim=8"),
            "model.base_width",
            "set model.base_width=null",
        ),
    ],
)
def test_mup_is_rejected_with_a_fix(overrides: tuple[str, ...], key: str, fix: str) -> None:
    issues = rejected(*overrides)
    assert fix in issues[key], issues


def test_mup_is_rejected_with_pretrained_weights(tmp_path: Path) -> None:
    issues = rejected(*MUP, f"model.weights={tmp_path}")
    assert "set model.base_width=null" in issues["model.base_width"]


def test_mup_is_rejected_with_quantized_weights() -> None:
    assert KEY in rejected(*MUP, "quantization=nf4", "adapter=lora")
    assert "quantization" in rejected(*MUP, "quantization=nf4")


def test_mup_is_rejected_for_transformers_models() -> None:
    issues = rejected("model=hf", *RANDOM_LLAMA, "data=synthetic", "hardware=cpu", MUP[-1])
    assert "model=decoder_nano" in issues[KEY], issues
