"""DPO: loss and gradients of the formula, every strategy, padding."""

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
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, marks
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scalewise import compose
from scalewise.adapters.build import disable_adapter
from scalewise.data.dataloader import Batch, BatchShare, ValidationLoader, as_batch
from scalewise.data.synthetic_datasets import RandomDataset
from scalewise.hardware import DeviceKind
from scalewise.models.base import AttentionFlops
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.objectives import DPO, IGNORED
from scalewise.objectives.losses import count_targets, set_chunked_loss
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ScaledLoss
from scalewise.strategies.single import SingleDevice

PAIRS = ("objective=dpo", "objective.beta=0.5", "data.pairs=true")
MODES = {
    "cached_reference": PAIRS,
    "disabled_adapter": (*PAIRS, "adapter=lora"),
    "pissa": (*PAIRS, "adapter=pissa"),
}
"""Cached or computed reference log-probabilities; PiSSA changes the base weights."""
CI_STRATEGIES = {"cached_reference": ("fsdp",), "disabled_adapter": ("tensor",), "pissa": ()}
TOLERANCE = 1e-5
"""Of a margin: the difference of log-probabilities of 100 nats or more."""
CASES = [
    pytest.param(
        mode_name, strategy, marks=() if runs_in_ci else (*marks(strategy), pytest.mark.exhaustive)
    )
    for mode_name in MODES
    for strategy in STRATEGIES
    for runs_in_ci in [strategy in CI_STRATEGIES[mode_name]]
    if not ("pipeline" in strategy or "context" in strategy)  # which is rejected
]


@pytest.fixture
def run() -> RunConfig:
    return compose([*TINY_DECODER, *LLAMA, *PAIRS, "adapter=lora"])


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


def batch(run: RunConfig, pairs: int, num_padding: int = 0) -> Batch:
    """Pairs whose answers differ in length, and padding pairs."""
    dataset = RandomDataset(3, run.model.vocabulary, 0, 50, run.data.sequence, 0.2, pairs=True)
    tokens_P2S = dataset.gather(range(pairs))
    for pair, pair_tokens in enumerate(tokens_P2S):
        for side, tokens in enumerate(pair_tokens):
            tokens[len(tokens) - 3 * pair - 2 * side :] = ~0
    filler = np.full((num_padding, *tokens_P2S.shape[1:]), ~0)
    return as_batch(np.concatenate([tokens_P2S, filler]), pin_memory=False, masked=True)


def reference_dpo(
    logits_BTV: Tensor, reference_logits_BTV: Tensor, labels_BT: Tensor, beta: float
) -> Tensor:
    """Equation 7 of Rafailov et al. (2023), averaged over the pairs, computed pair by pair."""
    losses = []
    for pair in range(0, len(labels_BT), 2):
        margins = []
        for index in (pair, pair + 1):
            real = labels_BT[index] != IGNORED
            label_N = labels_BT[index][real][:, None]
            policy_logprob, reference_logprob = (
                logits[index][real].log_softmax(-1).gather(-1, label_N).sum()
                for logits in (logits_BTV, reference_logits_BTV)
            )
            margins.append(policy_logprob - reference_logprob)
        losses.append(-torch.sigmoid(beta * (margins[0] - margins[1])).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk", [None, 24])
def test_dpo_loss_and_gradients_equal_the_formula(
    chunk: int | None, run: RunConfig, module: ModelModule
) -> None:
    reference = build_model(run.model, run.seed)
    objective = replace(run.objective, loss_chunk=chunk)
    assert isinstance(objective, DPO)
    pairs_batch = batch(run, 5)
    expected = reference_dpo(
        module(pairs_batch["inputs"]),
        reference(pairs_batch["inputs"]).detach(),
        pairs_batch["labels"],
        0.5,
    )
    expected.backward()
    gradients = _gradients(module)
    module.zero_grad()
    set_chunked_loss(objective, module, in_forward=False)
    with torch.no_grad(), disable_adapter(run.adapter, module):
        pairs_batch["reference"] = ScaledLoss(objective.reference_objective).compute(
            module, pairs_batch
        )
    actual_3 = ScaledLoss(objective, 1 / 5).compute(module, pairs_batch)
    actual_3[0].backward()
    torch.testing.assert_close(actual_3[0], expected, rtol=1e-5, atol=0)
    assert_tensors_close(_gradients(module), gradients, "gradients")


def _gradients(module: ModelModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_dpo_padding_pairs_add_nothing(run: RunConfig, module: ModelModule) -> None:
    objective = DPO()
    results = []
    for num_padding in (0, 3):
        pairs_batch = batch(run, 4, num_padding)
        reference_logprobs_B = -torch.arange(2.0 * (4 + num_padding))
        loss_3 = ScaledLoss(objective).compute(
            module, {**pairs_batch, "reference": reference_logprobs_B}
        )
        assert int(count_targets(objective, pairs_batch["labels"])) == 4, num_padding
        results.append(loss_3)
    torch.testing.assert_close(results[0], results[1])


def test_dpo_untrained_model_equals_its_reference(run: RunConfig) -> None:
    objective, pairs_batch = DPO(), batch(run, 4)
    model = build_model(run.model, 1)
    pairs_batch["reference"] = (
        ScaledLoss(objective.reference_objective).compute(model, pairs_batch).detach()
    )
    loss, margin, accuracy = ScaledLoss(objective, 1 / 4).compute(model, pairs_batch).tolist()
    assert (loss, margin, accuracy) == (pytest.approx(np.log(2)), 0.0, 0.5)


def test_dpo_reference_is_the_model_without_adapter(run: RunConfig, module: ModelModule) -> None:
    tokens_BT, trained_module = torch.arange(64).reshape(2, 32), _trained(module)
    policy_logits, base_logits = module(tokens_BT), build_model(run.model, run.seed)(tokens_BT)
    with disable_adapter(run.adapter, module):
        torch.testing.assert_close(module(tokens_BT), base_logits, rtol=0, atol=0)
    torch.testing.assert_close(module(tokens_BT), policy_logits, rtol=0, atol=0)
    assert not torch.allclose(policy_logits, base_logits)
    assert _trained(module) == trained_module


def _trained(module: ModelModule) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_dpo_flops_equal_torch_counter() -> None:
    run = compose([*TINY_DECODER, *LLAMA, *PAIRS, "adapter=lora", "model.layers=8"])
    module: Any = SingleDevice(DeviceKind.cpu).build(run)
    tokens = torch.zeros(2, run.data.sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # the counter omits attention on CPU
        with torch.no_grad(), disable_adapter(run.adapter, module):
            module(tokens)
        module(tokens).float().logsumexp(-1).sum().backward()
    passes = 3.5 + 1  # attention forward and backward, and the reference forward
    attention = passes * 4.0 * run.data.sequence * run.model.query_width * run.model.layers
    counted_flops = counter.get_total_flops() / tokens.numel()
    assert run.count_flops(AttentionFlops.kernel) - attention == pytest.approx(
        counted_flops, rel=0.05
    )


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (3, 2)])
def test_dpo_reference_logprobs_are_computed_once(ranks: int, micro_batch: int) -> None:
    dataset = RandomDataset(3, 50, 0, 11, 8, pairs=True)
    batch_shares = [BatchShare(11, micro_batch, rank, ranks) for rank in range(ranks)]
    loaders = [ValidationLoader(dataset, batch_share) for batch_share in batch_shares]
    reference_logprobs_N2 = np.zeros((11, 2), dtype=np.float32)
    for loader in loaders:
        for index_B, pairs_batch in loader.iter_indexed_batches(steps=1):
            first_tokens_B2 = pairs_batch["inputs"][:, 0].view(-1, 2).numpy()
            reference_logprobs_N2[index_B[index_B >= 0]] += 1 + first_tokens_B2[index_B >= 0]
    assert (reference_logprobs_N2 == 1 + dataset.gather(range(11))[:, :, 0]).all()
    for loader in loaders:
        loader.reference_logprobs = reference_logprobs_N2
        for pairs_batch in loader:
            real = (pairs_batch["labels"] != IGNORED).any(1)
            assert (pairs_batch["reference"] == (1 + pairs_batch["inputs"][:, 0]) * real).all()


@pytest.mark.parametrize(("mode", "strategy"), CASES)
def test_dpo_under_each_strategy_equals_one_device(
    mode: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "combined", JobRunner(tmp_path, shared_cache), *MODES[mode]
    )
    expected = reference_run("combined", *MODES[mode])
    assert_same_training(run, expected)
    assert_margins_equal(run, expected)


def test_dpo_accumulation_changes_nothing(
    reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        (), "combined", JobRunner(tmp_path, shared_cache), *MODES["cached_reference"]
    )
    expected = reference_run("combined", *MODES["cached_reference"])
    assert_same_training(run, expected)
    assert_margins_equal(run, expected)
    assert expected.column("train/reward_accuracy")[0] == 0.5
    assert any(expected.column("train/reward_margin"))


def assert_margins_equal(run: RunDir, expected: RunDir) -> None:
    for key in ("train/reward_margin", "val/reward_margin"):
        assert run.column(key) == pytest.approx(expected.column(key), abs=TOLERANCE), key
    for key in ("train/reward_accuracy", "val/reward_accuracy"):
        assert run.column(key) == pytest.approx(expected.column(key)), key
