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
from scalewise.models.base import AttentionFlops
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.objectives import GRPO, IGNORED
from scalewise.objectives.losses import count_targets
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ScaledLoss
from scalewise.strategies.single import SingleDevice
from scalewise.training.rollout import Rollout

GRPO_OVERRIDES = ("objective=grpo", "objective.answers=4", "data=reversal", "data.sequence=32")
GRPO_WITH_KL = (*GRPO_OVERRIDES, "adapter=lora", "objective.beta=0.2")
MODES = {"no_kl": GRPO_OVERRIDES, "kl": GRPO_WITH_KL}
EXHAUSTIVE = pytest.mark.exhaustive
CASES = [
    ("kl", "fsdp"),
    *(
        pytest.param(*case, marks=EXHAUSTIVE)
        for case in [("no_kl", "ddp"), ("kl", "ddp"), ("no_kl", "fsdp")]
    ),
]


@pytest.fixture
def run() -> RunConfig:
    return compose([*TINY_DECODER, *LLAMA, *GRPO_WITH_KL])


@pytest.fixture
def module(run: RunConfig) -> ModelModule:
    """Adapted model with a nonzero adapter."""
    module_under_test: Any = SingleDevice(DeviceKind.cpu).build(run)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module_under_test.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return module_under_test


def prompts(run: RunConfig, num_padding: int = 0) -> Batch:
    """Five prompts with their answers, and padding samples."""
    tokens_BS = prepare_splits(run.data, run.model.vocabulary, 0).train.gather(range(5))
    filler = np.full((num_padding, tokens_BS.shape[1]), ~0)
    return as_batch(np.concatenate([tokens_BS, filler]), pin_memory=False, masked=True)


def rollout_of(run: RunConfig) -> Rollout:
    assert isinstance(run.objective, GRPO)
    return Rollout(run.objective, run.data)


def sample_rollout(run: RunConfig, module: ModelModule, batch: Batch, step: int = 0) -> Batch:
    with torch.no_grad():
        return rollout_of(run).sample(
            batch,
            lambda loss_objective, loss_batch: ScaledLoss(loss_objective).compute(
                module, loss_batch
            ),
            run.seed,
            step,
        )


def reference_grpo(
    logits_BTV: Tensor, reference_logits_BTV: Tensor, rollout_batch: Batch, group: int, beta: float
) -> Tensor:
    """Equation 3 of Shao et al. (2024), with the KL of equation 4, computed token by token."""
    losses = []
    for first in range(0, len(rollout_batch["labels"]), group):
        rewards = rollout_batch["reward"][first : first + group].tolist()
        for index in range(first, first + group):
            advantage = (rollout_batch["reward"][index].item() - np.mean(rewards)) / (
                np.std(rewards, ddof=1) + 1e-4
            )
            tokens = []
            for position, label in enumerate(rollout_batch["labels"][index].tolist()):
                if label == IGNORED:
                    continue
                policy_prob = logits_BTV[index, position].softmax(-1)[label]
                reference_prob = reference_logits_BTV[index, position].softmax(-1)[label]
                kl = reference_prob / policy_prob - (reference_prob / policy_prob).log() - 1
                tokens.append(-policy_prob / policy_prob.detach() * advantage + beta * kl)
            losses.append(torch.stack(tokens).mean())
    return torch.stack(losses).mean()


def test_grpo_gradients_equal_the_formula(run: RunConfig, module: ModelModule) -> None:
    rollout_batch = sample_rollout(run, module, prompts(run))
    assert rollout_batch["advantage"].any()
    reference = build_model(run.model, run.seed)(rollout_batch["inputs"]).detach()
    expected = reference_grpo(module(rollout_batch["inputs"]), reference, rollout_batch, 4, 0.2)
    expected.backward()
    gradients = _gradients(module)
    module.zero_grad()
    reference_objective = run.objective.reference_objective
    assert reference_objective is not None
    with torch.no_grad(), disable_adapter(run.adapter, module):
        rollout_batch["reference"] = ScaledLoss(reference_objective).compute(module, rollout_batch)
    loss, reward, kl = ScaledLoss(run.objective, 1 / 20).compute(module, rollout_batch)
    loss.backward()
    assert_tensors_close(_gradients(module), gradients, "gradients")
    assert kl > 0
    torch.testing.assert_close(loss, expected + 1 - reward)  # the missing part of the full reward


def _gradients(module: ModelModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_grpo_padding_samples_add_nothing(run: RunConfig, module: ModelModule) -> None:
    objective = replace(run.objective, beta=0.0)
    results = []
    for num_padding in (0, 3):
        rollout_batch = sample_rollout(run, module, prompts(run, num_padding))
        assert int(count_targets(objective, rollout_batch["labels"])) == 20, num_padding
        results.append(ScaledLoss(objective).compute(module, rollout_batch))
    torch.testing.assert_close(results[0], results[1])


def test_grpo_completions_depend_on_the_prompt_only(run: RunConfig, module: ModelModule) -> None:
    rollout_batch = prompts(run)
    expected = sample_rollout(run, module, rollout_batch)["labels"]
    changed_batch = {key: tensor.clone() for key, tensor in rollout_batch.items()}
    changed_batch["labels"][changed_batch["labels"] != IGNORED] = 0
    changed_batch["inputs"][:, 1 - run.data.answer_length :] = 0
    assert torch.equal(sample_rollout(run, module, changed_batch)["labels"], expected)
    single_prompt = {key: rollout_batch[key][2:3] for key in ("inputs", "labels")}
    assert torch.equal(sample_rollout(run, module, single_prompt)["labels"], expected[8:12])
    assert not torch.equal(sample_rollout(run, module, rollout_batch, step=1)["labels"], expected)


def test_grpo_sampling_follows_token_probabilities(run: RunConfig) -> None:
    objective = GRPO(answers=20_000)
    probs_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rollout_batch = {key: tensor[:1] for key, tensor in prompts(run).items()}
    rollout = Rollout(objective, run.data).sample(
        rollout_batch,
        lambda sampled_objective, batch: probs_V.log().expand(20_000, 4),
        seed=3,
        step=7,
    )
    for position in range(32 - run.data.answer_length, 32):
        frequencies_V = torch.bincount(rollout["labels"][:, position], minlength=4) / 20_000
        torch.testing.assert_close(frequencies_V, probs_V, rtol=0, atol=0.02)


def test_grpo_flops_equal_torch_counter() -> None:
    run = compose([*TINY_DECODER, *LLAMA, *GRPO_OVERRIDES, "model.layers=8"])
    module: Any = SingleDevice(DeviceKind.cpu).build(run)
    batch = prompts(run)
    with FlopCounterMode(display=False) as counter:  # the counter omits attention on CPU
        rollout_batch = sample_rollout(run, module, batch)
        ScaledLoss(run.objective).compute(module, rollout_batch)[0].backward()
    passes = 3.5 + run.data.answer_length
    attention = passes * 4.0 * run.data.sequence * run.model.query_width * run.model.layers
    counted_flops = counter.get_total_flops() / rollout_batch["inputs"].numel()
    assert run.count_flops(AttentionFlops.kernel) - attention == pytest.approx(
        counted_flops, rel=0.05
    )


@pytest.mark.parametrize(("mode", "strategy"), CASES)
def test_grpo_under_each_strategy_equals_one_device(
    mode: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "one_micro_batch", JobRunner(tmp_path, shared_cache), *MODES[mode]
    )
    expected = reference_run("one_micro_batch", *MODES[mode])
    assert_same_training(run, expected)
    assert_rewards_equal(run, expected)


def test_grpo_accumulation_changes_nothing(
    reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy((), "one_micro_batch", run_job, *MODES["no_kl"], "trainer.micro_batch=3")
    assert_same_training(run, reference_run("one_micro_batch", *MODES["no_kl"]))
    assert_rewards_equal(run, reference_run("one_micro_batch", *MODES["no_kl"]))


def assert_rewards_equal(run: RunDir, expected: RunDir) -> None:
    for key in ("train/reward", "val/reward"):
        assert run.column(key) == pytest.approx(expected.column(key)), key
    assert any(expected.column("train/reward"))
