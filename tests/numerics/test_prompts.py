"""Prompt tuning: PEFT's logits, losses and gradients, and one device's in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.jobs import Job
from fixtures.layouts import GPT2, LAYOUTS, LLAMA, SHAPE, marks
from fixtures.steps import Reference, assert_equal, gradients, steps_of
from peft import PeftModel, PromptTuningConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from scalewise import cli, compose
from scalewise.adapters.prompts import NAME
from scalewise.exports import Form, folder
from scalewise.hardware import DeviceKind
from scalewise.layouts.single import SingleLayout
from scalewise.models.decoder import weights
from scalewise.objectives import IGNORED
from scalewise.verbs.trained import recorded

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
"""PEFT asks for it."""

PROMPT = ("adapter=prompt", "adapter.tokens=5", "model.context=37")
TOKENS_BT = torch.arange(64).reshape(2, 32)
USUAL = ("fsdp", "deepspeed_zero3")
EACH = ("ddp", "fsdp", "fsdp_offload", "hsdp", "replicate_shard", "deepspeed_zero2")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            each, marks=(*marks(each), *(() if each in USUAL else [pytest.mark.exhaustive]))
        )
        for each in dict.fromkeys((*USUAL, *EACH))
    ],
)
def test_vectors_take_the_steps_of_one_device(
    layout: str, alone: Reference, tmp_path: Path, shared_cache: Path
) -> None:
    run = steps_of(LAYOUTS[layout], "accumulated", Job(tmp_path, shared_cache), *PROMPT)
    reference = alone("accumulated", *PROMPT)
    assert_equal(run, reference)
    assert [*gradients(reference, 2)] == [f"model.{NAME}"]
    held, wanted = run.weights(), reference.weights()
    first = dict(
        SingleLayout(DeviceKind.cpu).build(compose([*SHAPE, *LLAMA, *PROMPT])).named_parameters()
    )
    assert held.keys() == {f"model.{name}" for name in first}
    for name, tensor in first.items():
        assert torch.equal(held[f"model.{name}"], tensor) == (name != NAME), name
        assert torch.equal(wanted[f"model.{name}"], tensor) == (name != NAME), name


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_vectors_compute_what_peft_does(shape: tuple[str, ...], tmp_path: Path) -> None:
    spec = compose([*SHAPE, *shape, *PROMPT])
    ours = SingleLayout(DeviceKind.cpu).build(spec)
    weights.export(spec.model.build(spec.seed).state_dict(), spec.model, tmp_path)
    config = PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), config)
    vectors = theirs.prompt_encoder["default"].embedding.weight
    with torch.no_grad():
        vectors.copy_(ours.get_parameter(NAME))
    labels_BT = TOKENS_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORED
    found = ours(TOKENS_BT)
    asked_BT = TOKENS_BT.clone()
    asked_BT[:, 0] = IGNORED  # which the last vector would be asked for
    wanted = theirs(TOKENS_BT, labels=asked_BT)
    torch.testing.assert_close(found, wanted.logits[:, 5:], rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(found.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.loss.backward()
    trained = {name for name, p in ours.named_parameters() if p.grad is not None}
    assert trained == {NAME}
    assert vectors.grad is not None
    torch.testing.assert_close(ours.get_parameter(NAME).grad, vectors.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_what_was_trained_goes_to_peft_and_back(
    shape: tuple[str, ...], alone: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = "accumulated" if shape is LLAMA else "all_at_once"
    run = alone(batch, *PROMPT)
    told = recorded(run.path)
    assert folder.write(told, tmp_path / "alone", Form.alone) == [
        "no tokenizer: the data were token ids"
    ]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "alone").eval()
    resume = f"adapter.resume={tmp_path / 'alone'}"
    ours = SingleLayout(DeviceKind.cpu).build(compose([*SHAPE, *shape, *PROMPT, resume]))
    assert torch.equal(ours.get_parameter(NAME), run.weights()[f"model.{NAME}"])
    with torch.no_grad():
        wanted = theirs(TOKENS_BT).logits[:, 5:]
        torch.testing.assert_close(ours(TOKENS_BT), wanted, rtol=1e-5, atol=1e-5)
    assert cli.main(["export", str(run.path), f"to={tmp_path / 'merged'}"]) == 2
    assert "set adapter=alone" in capsys.readouterr().err
    other = compose([*SHAPE, *shape, *PROMPT, "adapter.tokens=4", resume], here=False)
    (complaint,) = other.adapter.machine_complaints(other)
    assert complaint.key == "adapter.tokens"


@pytest.mark.exhaustive
def test_a_run_goes_on_from_another_and_is_evaluated(
    alone: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = alone("accumulated", *PROMPT)
    run = alone("accumulated", *PROMPT, f"adapter.resume={earlier.path}")
    assert run.column("train/loss")[0] < earlier.column("train/loss")[0]
    assert cli.main(["evaluate", str(run.path)]) == 0
    told = capsys.readouterr().out
    assert f"{run.column('val/loss')[-1]:.4f}" in told


def test_flops_are_those_torch_counts() -> None:
    run = compose([*SHAPE, *LLAMA, *PROMPT])
    module = SingleLayout(DeviceKind.cpu).build(run)
    with FlopCounterMode(display=False) as counter:  # it counts no attention on the CPU
        module(TOKENS_BT).float().logsumexp(-1).sum().backward()
    attention = 14.0 * 37 * run.model.query_width * run.model.layers * 37 / 32
    found = counter.get_total_flops() / TOKENS_BT.numel()
    assert run.flops_per_token - attention == pytest.approx(found, rel=0.01)


def test_the_census_is_the_module() -> None:
    run = compose([*SHAPE, *GPT2, *PROMPT])
    module = SingleLayout(DeviceKind.cpu).build(run)
    found = [(name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()]
    assert found == [(w.name, w.shape, w.trainable) for w in run.census()]
