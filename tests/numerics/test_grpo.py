"""GRPO: gradients of the formula, sampling, FLOPs, every strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    ReferenceRun,
    assert_same_training,
    assert_tensors_close,
    train_strategy,
)
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scalewise import compose
from scalewise.adapters.build import disable_adapter
from scalewise.data.dataloader import Batch, as_batch
from scalewise.data.prepare import prepare_splits
from scalewise.hardware import DeviceKind
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.objectives import GRPO, IGNORED
from scalewise.objectives.losses import count_targets
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ScaledLoss
from scalewise.strategies.single import SingleDevice
from scalewise.training.rollout import Rollout

REWARDS = ("objective=grpo", "objective.answers=4", "data=reversal", "data.sequence=32")
PAID = (*REWARDS, "adapter=lora", "objective.beta=0.2")
WAYS = {"free": REWARDS, "paid": PAID}
LONG = pytest.mark.exhaustive
CASES = [
    ("paid", "fsdp"),
    *(
        pytest.param(*case, marks=LONG)
        for case in [("free", "ddp"), ("paid", "ddp"), ("free", "fsdp")]
    ),
]


@pytest.fixture
def run() -> RunConfig:
    return compose([*TINY_DECODER, *LLAMA, *PAID])


@pytest.fixture
def module(run: RunConfig) -> ModelModule:
    """An adapted model that has learnt something."""
    built: Any = SingleDevice(DeviceKind.cpu).build(run)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return built


def prompts(run: RunConfig, filled: int = 0) -> Batch:
    """Returns five prompts with their right answers, and rows that fill the batch up."""
    tokens_BS = prepare_splits(run.data, run.model.vocabulary, 0).train.gather(range(5))
    filler = np.full((filled, tokens_BS.shape[1]), ~0)
    return as_batch(np.concatenate([tokens_BS, filler]), pin_memory=False, masked=True)


def answering(run: RunConfig) -> Rollout:
    assert isinstance(run.objective, GRPO)
    return Rollout(run.objective, run.data)


def explored(run: RunConfig, module: ModelModule, batch: Batch, step: int = 0) -> Batch:
    with torch.no_grad():
        return answering(run).sample(
            batch, lambda asked, given: ScaledLoss(asked).compute(module, given), run.seed, step
        )


def by_hand(logits_BTV: Tensor, said_BTV: Tensor, given: Batch, group: int, beta: float) -> Tensor:
    """Returns equation 3 of Shao et al. (2024), with the KL of equation 4, token by token."""
    losses = []
    for first in range(0, len(given["labels"]), group):
        rewards = given["reward"][first : first + group].tolist()
        for row in range(first, first + group):
            advantage = (given["reward"][row].item() - np.mean(rewards)) / (
                np.std(rewards, ddof=1) + 1e-4
            )
            tokens = []
            for place, label in enumerate(given["labels"][row].tolist()):
                if label == IGNORED:
                    continue
                own = logits_BTV[row, place].softmax(-1)[label]
                said = said_BTV[row, place].softmax(-1)[label]
                kl = said / own - (said / own).log() - 1
                tokens.append(-own / own.detach() * advantage + beta * kl)
            losses.append(torch.stack(tokens).mean())
    return torch.stack(losses).mean()


def test_grpo_gradients_equal_the_formula(run: RunConfig, module: ModelModule) -> None:
    given = explored(run, module, prompts(run))
    assert given["advantage"].any()
    reference = build_model(run.model, run.seed)(given["inputs"]).detach()
    expected = by_hand(module(given["inputs"]), reference, given, 4, 0.2)
    expected.backward()
    gradients = _gradients(module)
    module.zero_grad()
    question = run.objective.reference_objective
    assert question is not None
    with torch.no_grad(), disable_adapter(run.adapter, module):
        given["reference"] = ScaledLoss(question).compute(module, given)
    loss, reward, kl = ScaledLoss(run.objective, 1 / 20).compute(module, given)
    loss.backward()
    assert_tensors_close(_gradients(module), gradients, "gradients")
    assert kl > 0
    torch.testing.assert_close(loss, expected + 1 - reward)  # what is lost of the whole reward


def _gradients(module: ModelModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_grpo_padding_samples_add_nothing(run: RunConfig, module: ModelModule) -> None:
    objective = replace(run.objective, beta=0.0)
    found = []
    for filled in (0, 3):
        given = explored(run, module, prompts(run, filled))
        assert int(count_targets(objective, given["labels"])) == 20, filled
        found.append(ScaledLoss(objective).compute(module, given))
    torch.testing.assert_close(found[0], found[1])


def test_grpo_completions_depend_on_the_prompt_only(run: RunConfig, module: ModelModule) -> None:
    given = prompts(run)
    expected = explored(run, module, given)["labels"]
    blind = {key: tensor.clone() for key, tensor in given.items()}
    blind["labels"][blind["labels"] != IGNORED] = 0
    blind["inputs"][:, 1 - run.data.answer_length :] = 0
    assert torch.equal(explored(run, module, blind)["labels"], expected)
    apart = {key: given[key][2:3] for key in ("inputs", "labels")}
    assert torch.equal(explored(run, module, apart)["labels"], expected[8:12])
    assert not torch.equal(explored(run, module, given, step=1)["labels"], expected)


def test_grpo_sampling_follows_token_probabilities(run: RunConfig) -> None:
    objective = GRPO(answers=20_000)
    shares_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    given = {key: tensor[:1] for key, tensor in prompts(run).items()}
    found = Rollout(objective, run.data).sample(
        given, lambda asked, batch: shares_V.log().expand(20_000, 4), seed=3, step=7
    )
    for place in range(32 - run.data.answer_length, 32):
        drawn_V = torch.bincount(found["labels"][:, place], minlength=4) / 20_000
        torch.testing.assert_close(drawn_V, shares_V, rtol=0, atol=0.02)


def test_grpo_flops_equal_torch_counter() -> None:
    run = compose([*TINY_DECODER, *LLAMA, *REWARDS, "model.layers=8"])
    module: Any = SingleDevice(DeviceKind.cpu).build(run)
    batch = prompts(run)
    with FlopCounterMode(display=False) as counter:  # it counts no attention on the CPU
        given = explored(run, module, batch)
        ScaledLoss(run.objective).compute(module, given)[0].backward()
    passes = 3.5 + run.data.answer_length
    attention = passes * 4.0 * run.data.sequence * run.model.query_width * run.model.layers
    found = counter.get_total_flops() / given["inputs"].numel()
    assert run.flops_per_token - attention == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(("mode", "strategy"), CASES)
def test_grpo_under_each_strategy_equals_one_device(
    mode: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "one_pass", JobRunner(tmp_path, shared_cache), *WAYS[mode]
    )
    expected = reference_run("one_pass", *WAYS[mode])
    assert_same_training(run, expected)
    assert_rewards_equal(run, expected)


def test_grpo_accumulation_changes_nothing(
    reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy((), "one_pass", run_job, *WAYS["free"], "trainer.micro_batch=3")
    assert_same_training(run, reference_run("one_pass", *WAYS["free"]))
    assert_rewards_equal(run, reference_run("one_pass", *WAYS["free"]))


def assert_rewards_equal(run: RunDir, expected: RunDir) -> None:
    for key in ("train/reward", "val/reward"):
        assert run.column(key) == pytest.approx(expected.column(key)), key
    assert any(expected.column("train/reward"))
