"""Batch-size warm-up: a hand-written loop, every strategy, and the data of each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    SGD,
    ReferenceRun,
    assert_same_training,
    assert_tensors_close,
    load_gradients,
    train_strategy,
)
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, strategy_batch_params
from torch.nn import functional

from scalewise import compose
from scalewise.bench.memory_accuracy_runs import SMALL
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.datasets import PackedDataset, epoch_permutation
from scalewise.data.prepare import prepare_splits
from scalewise.models.build import build_model
from scalewise.objectives import IGNORED
from scalewise.planner import peak_memory

BATCHES = [24, 48, 72]
"""Global batch size of each of three steps."""
WARMUP = (
    "+trainer.batch_warmup={first:{until_step:1,global_batch:24},"
    "second:{until_step:2,global_batch:48}}",
    "trainer.global_batch=72",
)
CI_STRATEGIES = ("ddp", "fsdp", "tensor", "context", "pipeline_one_f_one_b", "deepspeed_zero2")


@pytest.mark.parametrize(("strategy", "batch"), strategy_batch_params(CI_STRATEGIES))
def test_warmup_under_a_strategy_equals_one_device(
    strategy: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(STRATEGIES[strategy], batch, JobRunner(tmp_path, shared_cache), *WARMUP)
    assert_same_training(run, reference_run(batch, *WARMUP))


def test_training_equals_a_hand_written_loop(reference_run: ReferenceRun) -> None:
    overrides = (*WARMUP, "optimizer.weight_decay=0")
    run = reference_run("accumulated", *overrides)
    config = compose([*TINY_DECODER, *SGD, *LLAMA, *overrides, "trainer.micro_batch=12"])
    dataset = prepare_splits(config.data, config.model.vocabulary, config.seed).train
    order = epoch_permutation(len(dataset), config.seed, 0)
    model = build_model(config.model, config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, start = [], 0
    for step, samples in enumerate(BATCHES):
        tokens_BS = torch.from_numpy(dataset.gather(order[start : start + samples]))
        start += samples
        logits_BTV = model(tokens_BS[:, :-1])
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {f"model.{name}": it.grad for name, it in model.named_parameters()}
        assert_tensors_close(load_gradients(run, step), gradients, f"gradients of step {step}")
        optimizer.step()
        losses.append(float(loss.detach()))
    assert run.column("train/loss") == pytest.approx(losses, rel=1e-5)


EXPERTS = ("model.experts=4", "model.aux_loss=0.1", "model.router_z_loss=0.01")


@pytest.mark.parametrize("model", [(), EXPERTS], ids=["dense", "experts"])
def test_first_stage_is_bitwise_the_run_with_its_batch(
    model: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)

    def train(*overrides: str) -> RunDir:
        return run_job(*model, "trainer.micro_batch=2", "trainer.max_steps=6", *overrides)

    stage = "+trainer.batch_warmup={first:{until_step:4,global_batch:6}}"
    run = train(stage, "trainer.global_batch=10")
    constant = train("trainer.global_batch=6")
    for key in ("train/loss", "train/grad_norm", "train/lr", "train/tokens"):
        assert run.column(key)[:4] == constant.column(key)[:4], key
    assert run.column("train/loss")[5] != constant.column("train/loss")[5]
    tokens = [32 * count for count in (6, 12, 18, 24, 34, 44)]
    assert run.column("train/tokens") == tokens
    assert run.summary["tokens"] == tokens[-1]
    assert run.column("train/global_batch") == [6, 6, 6, 6, 10, 10]
    step_tokens = np.diff(tokens, prepend=0)
    rates = np.array(run.column("throughput/tokens_per_s"))
    np.testing.assert_allclose(rates * run.column("time/step_s"), step_tokens, rtol=1e-6)
    flops = np.array(run.column("throughput/tflops_per_s_per_device")) * run.column("time/step_s")
    np.testing.assert_allclose(flops / step_tokens, (flops / step_tokens)[0], rtol=1e-6)
    assert run.summary["window"] == "median of steps 5-6"  # those of the final batch
    assert [int(row["step"]) for row in run.metrics if row["val/loss"]] == [4]


def test_validation_and_checkpoints_are_after_their_steps(
    tmp_path: Path, shared_cache: Path
) -> None:
    run = JobRunner(tmp_path, shared_cache)(
        "+trainer.batch_warmup={a:{until_step:3,global_batch:4},b:{until_step:5,global_batch:8}}",
        *("trainer.global_batch=16", "trainer.micro_batch=4", "trainer.validate_every=2"),
        *("checkpoint.every=3", "checkpoint.keep=0", "checkpoint.best=false"),
    )
    assert [int(row["step"]) for row in run.metrics if row["val/loss"]] == [2, 4, 6, 8]
    assert run.checkpoints == [3, 6, 8]


@pytest.mark.parametrize("parallelism", ["single", "ddp", "fsdp"])
def test_peak_memory_is_that_of_the_final_batch(
    parallelism: str, tmp_path: Path, shared_cache: Path
) -> None:
    batch = ("trainer.global_batch=12", "trainer.micro_batch=2", f"parallelism={parallelism}")
    stage = "+trainer.batch_warmup={first:{until_step:3,global_batch:4}}"
    overrides = (*SMALL, *batch, "trainer.max_steps=6")
    predicted = peak_memory.worst_rank_breakdown(compose([*overrides, stage])).peak
    assert predicted == peak_memory.worst_rank_breakdown(compose(overrides)).peak
    metrics = (
        JobRunner(tmp_path, shared_cache).without_defaults(*overrides, stage).summary["metrics"]
    )
    assert metrics["plan/peak_bytes"] == predicted
    assert abs(predicted / metrics["memory/peak_bytes"] - 1) < 0.02


SEQUENCE, SAMPLES, STAGES, STEPS = 4, 50, ((2, 4), (5, 8)), 9
STEP_SAMPLES = [4, 4, 8, 8, 8, 12, 12, 12, 12]


@pytest.mark.parametrize(("micro_batch", "ranks"), [(4, 1), (2, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_steps_read_the_samples_after_those_of_the_step_before(
    micro_batch: int, ranks: int, start: int
) -> None:
    tokens = np.arange(SAMPLES * SEQUENCE + 1, dtype=np.uint32)
    dataset = PackedDataset([tokens], SEQUENCE)
    order = np.concatenate([epoch_permutation(SAMPLES, 3, epoch) for epoch in range(2)])
    shares = [BatchShare(12, micro_batch, rank, ranks, STAGES) for rank in range(ranks)]
    first = shares[0].micro_batches_per_step.before(start)
    loaders = [TrainLoader(dataset, it, seed=3, steps=STEPS, start=first) for it in shares]
    read = [
        (batch["inputs"][:, 0] // SEQUENCE).tolist()
        for batches in zip(*loaders, strict=True)
        for batch in batches
    ]
    position = sum(STEP_SAMPLES[:start])
    expected = order[position : sum(STEP_SAMPLES)]
    assert np.concatenate(read).tolist() == expected.tolist()
    assert len(read) == len(expected) // micro_batch


def test_labels_of_a_step_are_those_of_its_micro_batches() -> None:
    run = compose([*TINY_DECODER, *LLAMA, "data.masked=0.5"])
    dataset = prepare_splits(run.data, run.model.vocabulary, run.seed).train
    share = BatchShare(12, 2, warmup=STAGES)
    batches = [*TrainLoader(dataset, share, seed=1, steps=STEPS)]
    number = 0
    for step, samples in enumerate(STEP_SAMPLES):
        of_step = batches[number : number + samples // 2]
        number += len(of_step)
        labels = sum(int((batch["labels"] != IGNORED).sum()) for batch in of_step)
        assert of_step[0]["labels_of_step"] == labels, step
        assert all("labels_of_step" not in batch for batch in of_step[1:]), step
    assert number == len(batches)
