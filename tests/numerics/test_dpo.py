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
from scalewise.models.base_module import ModelModule
from scalewise.models.build import build_model
from scalewise.objectives import DPO, IGNORED
from scalewise.objectives.losses import count_targets, set_chunked_loss
from scalewise.run_config import RunConfig
from scalewise.strategies.base import ScaledLoss
from scalewise.strategies.single import SingleDevice

PAIRS = ("objective=dpo", "objective.beta=0.5", "data.pairs=true")
WAYS = {"kept": PAIRS, "asked": (*PAIRS, "adapter=lora"), "pissa": (*PAIRS, "adapter=pissa")}
"""What the reference says is kept, or asked each pass; PiSSA's frozen weights are no reference."""
USUAL = {"kept": ("fsdp",), "asked": ("tensor",), "pissa": ()}
ROUNDING = 1e-5
"""Of a margin: a difference of log-probabilities of a hundred nats and more."""
CASES = [
    pytest.param(way, strategy, marks=() if usual else (*marks(strategy), pytest.mark.exhaustive))
    for way in WAYS
    for strategy in STRATEGIES
    for usual in [strategy in USUAL[way]]
    if not ("pipeline" in strategy or "context" in strategy)  # which is rejected
]


@pytest.fixture
def run() -> RunConfig:
    return compose([*TINY_DECODER, *LLAMA, *PAIRS, "adapter=lora"])


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


def batch(run: RunConfig, pairs: int, filled: int = 0) -> Batch:
    """Returns pairs whose answers differ in length, and some that fill the batch up."""
    rows = RandomDataset(3, run.model.vocabulary, 0, 50, run.data.sequence, 0.2, pairs=True)
    tokens_P2S = rows.gather(range(pairs))
    for pair, two in enumerate(tokens_P2S):
        for side, row in enumerate(two):
            row[len(row) - 3 * pair - 2 * side :] = ~0
    filler = np.full((filled, *tokens_P2S.shape[1:]), ~0)
    return as_batch(np.concatenate([tokens_P2S, filler]), pin_memory=False, masked=True)


def by_hand(logits_BTV: Tensor, said_BTV: Tensor, labels_BT: Tensor, beta: float) -> Tensor:
    """Returns equation 7 of Rafailov et al. (2023), its mean over the pairs, one by one."""
    losses = []
    for pair in range(0, len(labels_BT), 2):
        gained = []
        for row in (pair, pair + 1):
            real = labels_BT[row] != IGNORED
            label_N = labels_BT[row][real][:, None]
            own, said = (
                logits[row][real].log_softmax(-1).gather(-1, label_N).sum()
                for logits in (logits_BTV, said_BTV)
            )
            gained.append(own - said)
        losses.append(-torch.sigmoid(beta * (gained[0] - gained[1])).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk", [None, 24])
def test_dpo_loss_and_gradients_equal_the_formula(
    chunk: int | None, run: RunConfig, module: ModelModule
) -> None:
    reference = build_model(run.model, run.seed)
    objective = replace(run.objective, loss_chunk=chunk)
    assert isinstance(objective, DPO)
    given = batch(run, 5)
    expected = by_hand(
        module(given["inputs"]), reference(given["inputs"]).detach(), given["labels"], 0.5
    )
    expected.backward()
    gradients = _gradients(module)
    module.zero_grad()
    set_chunked_loss(objective, module, in_forward=False)
    with torch.no_grad(), disable_adapter(run.adapter, module):
        given["reference"] = ScaledLoss(objective.reference_objective).compute(module, given)
    found_3 = ScaledLoss(objective, 1 / 5).compute(module, given)
    found_3[0].backward()
    torch.testing.assert_close(found_3[0], expected, rtol=1e-5, atol=0)
    assert_tensors_close(_gradients(module), gradients, "gradients")


def _gradients(module: ModelModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_dpo_padding_pairs_add_nothing(run: RunConfig, module: ModelModule) -> None:
    objective = DPO()
    found = []
    for filled in (0, 3):
        given = batch(run, 4, filled)
        said_B = -torch.arange(2.0 * (4 + filled))
        loss_3 = ScaledLoss(objective).compute(module, {**given, "reference": said_B})
        assert int(count_targets(objective, given["labels"])) == 4, filled
        found.append(loss_3)
    torch.testing.assert_close(found[0], found[1])


def test_dpo_untrained_model_equals_its_reference(run: RunConfig) -> None:
    objective, given = DPO(), batch(run, 4)
    model = build_model(run.model, 1)
    given["reference"] = ScaledLoss(objective.reference_objective).compute(model, given).detach()
    loss, margin, right = ScaledLoss(objective, 1 / 4).compute(model, given).tolist()
    assert (loss, margin, right) == (pytest.approx(np.log(2)), 0.0, 0.5)


def test_dpo_reference_is_the_model_without_adapter(run: RunConfig, module: ModelModule) -> None:
    tokens_BT, trained = torch.arange(64).reshape(2, 32), _trained(module)
    learnt, plain = module(tokens_BT), build_model(run.model, run.seed)(tokens_BT)
    with disable_adapter(run.adapter, module):
        torch.testing.assert_close(module(tokens_BT), plain, rtol=0, atol=0)
    torch.testing.assert_close(module(tokens_BT), learnt, rtol=0, atol=0)
    assert not torch.allclose(learnt, plain)
    assert _trained(module) == trained


def _trained(module: ModelModule) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_dpo_flops_equal_torch_counter() -> None:
    run = compose([*TINY_DECODER, *LLAMA, *PAIRS, "adapter=lora", "model.layers=8"])
    module: Any = SingleDevice(DeviceKind.cpu).build(run)
    tokens = torch.zeros(2, run.data.sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:  # it counts no attention on the CPU
        with torch.no_grad(), disable_adapter(run.adapter, module):
            module(tokens)
        module(tokens).float().logsumexp(-1).sum().backward()
    passes = 3.5 + 1  # forward and backward of attention, and the reference's forward
    attention = passes * 4.0 * run.data.sequence * run.model.query_width * run.model.layers
    found = counter.get_total_flops() / tokens.numel()
    assert run.flops_per_token - attention == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (3, 2)])
def test_dpo_reference_logprobs_are_computed_once(ranks: int, micro_batch: int) -> None:
    rows = RandomDataset(3, 50, 0, 11, 8, pairs=True)
    shares = [BatchShare(11, micro_batch, rank, ranks) for rank in range(ranks)]
    loaders = [ValidationLoader(rows, share) for share in shares]
    said_N2 = np.zeros((11, 2), dtype=np.float32)
    for loader in loaders:
        for index_B, given in loader.iter_indexed_batches(steps=1):
            firsts_B2 = given["inputs"][:, 0].view(-1, 2).numpy()
            said_N2[index_B[index_B >= 0]] += 1 + firsts_B2[index_B >= 0]
    assert (said_N2 == 1 + rows.gather(range(11))[:, :, 0]).all()
    for loader in loaders:
        loader.reference_logprobs = said_N2
        for given in loader:
            real = (given["labels"] != IGNORED).any(1)
            assert (given["reference"] == (1 + given["inputs"][:, 0]) * real).all()


@pytest.mark.parametrize(("mode", "strategy"), CASES)
def test_dpo_under_each_strategy_equals_one_device(
    mode: str, strategy: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(
        STRATEGIES[strategy], "all_at_once", JobRunner(tmp_path, shared_cache), *WAYS[mode]
    )
    expected = reference_run("all_at_once", *WAYS[mode])
    assert_same_training(run, expected)
    assert_margins_equal(run, expected)


def test_dpo_accumulation_changes_nothing(
    reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy((), "all_at_once", JobRunner(tmp_path, shared_cache), *WAYS["kept"])
    expected = reference_run("all_at_once", *WAYS["kept"])
    assert_same_training(run, expected)
    assert_margins_equal(run, expected)
    assert expected.column("train/reward_accuracy")[0] == 0.5
    assert any(expected.column("train/reward_margin"))


def assert_margins_equal(run: RunDir, expected: RunDir) -> None:
    for key in ("train/reward_margin", "val/reward_margin"):
        assert run.column(key) == pytest.approx(expected.column(key), abs=ROUNDING), key
    for key in ("train/reward_accuracy", "val/reward_accuracy"):
        assert run.column(key) == pytest.approx(expected.column(key)), key
