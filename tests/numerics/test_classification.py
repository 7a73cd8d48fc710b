"""Classification: logits of transformers, every strategy, labels at the end of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.decoder_configs import GPT2, LLAMA, random_tokens
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    ReferenceRun,
    assert_same_training,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from scalewise import ConfigError, compose
from scalewise.models.build import build_model, export_model
from scalewise.models.decoder.config import DecoderConfig

CLASSES = (
    "objective=classification",
    "data=corpus_classes",
    "data.sequence=32",
    "data.vocabulary=258",
    "model.vocabulary=258",
    "model.classes=2",
    "model.tied=false",
)
CI_STRATEGIES = ("ddp", "fsdp")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            n, marks=(*marks(n), *(() if n in CI_STRATEGIES else (pytest.mark.exhaustive,)))
        )
        for n in STRATEGIES
        if not ("tensor" in n or "zero_bubble" in n)  # which is rejected
    ],
)
def test_classification_under_each_strategy_equals_one_device(
    strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "accumulated", JobRunner(tmp_path, shared_cache), *CLASSES
    )
    reference = reference_run("accumulated", *CLASSES)
    assert_same_training(run, reference)
    for key in ("train/accuracy", "val/accuracy"):
        assert run.column(key) == pytest.approx(reference.column(key)), key


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_classification_logits_equal_transformers(spec: DecoderConfig, tmp_path: Path) -> None:
    model = replace(spec, classes=3, tied=False)
    module, tokens_BT = build_model(model, 1).eval(), random_tokens(model)
    export_model(model, module.state_dict(), tmp_path)
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert peer.config.num_labels == 3
    with torch.no_grad():
        for tokens_T in tokens_BT:  # without a padding token, one sequence at a time
            expected_1C = peer(tokens_T[None]).logits
            torch.testing.assert_close(module(tokens_T[None])[:, -1], expected_1C)
    loaded_model = build_model(replace(model, weights=str(tmp_path)), 2)
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded_model.state_dict()[name], tensor), name


def test_classification_adds_a_head_to_a_language_model(tmp_path: Path) -> None:
    spec = replace(LLAMA, tied=False)
    pretrained = build_model(spec, 1)
    export_model(spec, pretrained.state_dict(), tmp_path)
    model = replace(spec, classes=3, weights=str(tmp_path))
    first, second_state = (build_model(model, seed).state_dict() for seed in (1, 2))
    assert first["head.weight"].shape == (3, spec.width)
    assert not torch.equal(first.pop("head.weight"), second_state["head.weight"])
    for name, tensor in first.items():
        assert torch.equal(pretrained.state_dict()[name], tensor), name


def test_classification_head_flops_equal_torch_counter() -> None:
    flops_by_shape = {}
    for spec in (LLAMA, replace(LLAMA, classes=3)):
        module, tokens_BT = build_model(spec, 1), random_tokens(spec)
        assert spec.num_parameters == sum(p.numel() for p in module.parameters()), spec
        with FlopCounterMode(display=False) as counter:
            module(tokens_BT).sum().backward()
        flops_by_shape[spec] = counter.get_total_flops() / tokens_BT.numel()
    (token_shape, token_flops), (class_shape, class_flops) = flops_by_shape.items()
    assert token_shape.flops(48) - class_shape.flops(48) == token_flops - class_flops > 0


def test_classification_adapter_trains_the_head(reference_run: ReferenceRun) -> None:
    lora = ("adapter=lora", "adapter.rank=4", "adapter.trained=[head]")
    run = reference_run("accumulated", *CLASSES, *lora)
    trained_names = {name.removeprefix("model.") for name in load_gradients(run, 2)}
    assert "head.weight" in trained_names
    assert trained_names == {
        w.name for w in compose([*TINY_DECODER, *CLASSES, *lora]).weight_census() if w.trainable
    }
    with pytest.raises(
        ConfigError, match=r"randomly initialized classification head; set 'adapter\.trained="
    ):
        compose([*TINY_DECODER, *CLASSES, "adapter=lora"])
