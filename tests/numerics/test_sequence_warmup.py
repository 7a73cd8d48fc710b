"""Sequence-length warm-up: a hand-written loop, every strategy, and the data of each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.cli_runner import UNTRACKED
from fixtures.hf_checkpoints import LLAMA_CONFIG_DIR
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    SGD,
    ReferenceRun,
    assert_same_training,
    assert_tensors_close,
    load_gradients,
    train_strategy,
    transformers_overrides,
)
from fixtures.strategies import LLAMA, STRATEGIES, TINY_DECODER, strategy_batch_params
from torch.nn import functional

from scalewise import compose
from scalewise.bench.memory_accuracy_runs import SMALL
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.datasets import epoch_permutation
from scalewise.data.prepare import prepare_splits
from scalewise.models.build import build_model
from scalewise.objectives import IGNORED
from scalewise.planner import peak_memory
from scalewise.step_counts import StepCounts

LENGTHS = [8, 16, 32]
"""Sequence length of each of three steps."""
WARMUP = (
    "+trainer.sequence_warmup={first:{until_step:1,sequence:8},second:{until_step:2,sequence:16}}",
)
BATCH_WARMUP = (
    "+trainer.batch_warmup={first:{until_step:1,global_batch:24}}",
    "trainer.global_batch=48",
)
CI_STRATEGIES = ("context", "fsdp", "pipeline_one_f_one_b", "tensor")
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(("strategy", "batch"), strategy_batch_params(CI_STRATEGIES))
def test_warmup_under_a_strategy_equals_one_device(
    strategy: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(STRATEGIES[strategy], batch, JobRunner(tmp_path, shared_cache), *WARMUP)
    assert_same_training(run, reference_run(batch, *WARMUP))


OPTIONS = {
    "packing": ("data.packing=true",),
    "loss_chunk": ("objective.loss_chunk=24",),
    "recomputation": ("memory=checkpoint_full",),
    "batch_warmup": BATCH_WARMUP,
    # A batch without padding, which would be routed to experts too.
    "experts": ("model.experts=4", "model.router_z_loss=0.01", "trainer.global_batch=24"),
    "aux_loss": ("model.experts=4", "model.aux_loss=0.1", "trainer.global_batch=24"),
    "window": ("model.window=9", "model.global_every=2"),
}

REJECTED_OPTIONS = {
    # The loss requires the loads of whole sequences, of which a context rank has a part.
    **dict.fromkeys(("context", "context_gather", "pipeline_context"), ("aux_loss",)),
    "pipeline_zbv_zero_bubble": ("recomputation",),  # the schedules support none
}
"""Options that are rejected with a strategy."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        (strategy, option)
        for strategy in (
            *("fsdp", "context", "context_gather", "tensor"),
            *("pipeline_zbv_zero_bubble", "pipeline_context"),
        )
        for option in OPTIONS
        if option not in REJECTED_OPTIONS.get(strategy, ())
    ],
)
def test_warmup_with_an_option_equals_one_device(
    strategy: str,
    option: str,
    reference_run: ReferenceRun,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    overrides = (*WARMUP, *OPTIONS[option])
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "accumulated", run_job, *overrides)
    assert_same_training(run, reference_run("accumulated", *overrides))


ADAPTER_TOKENS = ("adapter.tokens=4", "model.context=36")


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_warmup_with_adapter_tokens_equals_one_device(
    strategy: str, kind: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    overrides = (*WARMUP, f"adapter={kind}", *ADAPTER_TOKENS)
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "accumulated", run_job, *overrides)
    assert_same_training(run, reference_run("accumulated", *overrides))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_zero2", "tensor"])
def test_warmup_of_a_transformers_model_equals_one_device(
    strategy: str, tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    overrides = (*transformers_overrides(LLAMA_CONFIG_DIR, *WARMUP), "model.init=random")
    alone = run_job.without_defaults(*overrides, "trainer.micro_batch=12")
    sizes = ("trainer.micro_batch=2", "trainer.global_batch=12")
    run = run_job.without_defaults(*overrides, *STRATEGIES[strategy], *sizes)
    assert_same_training(run, alone)


@pytest.mark.parametrize("batch_warmup", [(), BATCH_WARMUP], ids=["alone", "batch_warmup"])
def test_training_equals_a_hand_written_loop(
    batch_warmup: tuple[str, ...], reference_run: ReferenceRun
) -> None:
    overrides = (*WARMUP, *batch_warmup, "optimizer.weight_decay=0")
    run = reference_run("accumulated", *overrides)
    config = compose([*TINY_DECODER, *SGD, *LLAMA, *overrides, "trainer.micro_batch=12"])
    dataset = prepare_splits(config.data, config.model.vocabulary, config.seed).train
    order = epoch_permutation(len(dataset), config.seed, 0)
    model = build_model(config.model, config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, start = [], 0
    batches = [24, 48, 48] if batch_warmup else [12, 12, 12]
    for step, (samples, length) in enumerate(zip(batches, LENGTHS, strict=True)):
        tokens_BS = torch.from_numpy(dataset.gather(order[start : start + samples]))
        inputs_BT, labels_BT = tokens_BS[:, :length], tokens_BS[:, 1 : length + 1]
        start += samples
        loss = functional.cross_entropy(model(inputs_BT).flatten(0, 1), labels_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {f"model.{name}": it.grad for name, it in model.named_parameters()}
        assert_tensors_close(load_gradients(run, step), gradients, f"gradients of step {step}")
        optimizer.step()
        losses.append(float(loss.detach()))
    assert run.column("train/loss") == pytest.approx(losses, rel=1e-5)
    validation = prepare_splits(config.data, config.model.vocabulary, config.seed).validation
    assert validation is not None
    tokens_BS = torch.from_numpy(validation.gather(np.arange(5)))  # trainer.validation_rows
    with torch.no_grad():
        logits_BTV = model(tokens_BS[:, :-1])
    loss = functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BS[:, 1:].flatten())
    assert run.column("val/loss")[-1] == pytest.approx(float(loss), rel=1e-5)
    tokens = np.cumsum(np.multiply(batches, LENGTHS)).tolist()
    assert run.column("train/tokens") == tokens
    assert run.summary["tokens"] == tokens[-1]


def test_metrics_count_the_tokens_and_flops_of_each_step(
    tmp_path: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    options = ("trainer.micro_batch=2", "trainer.global_batch=4", "trainer.max_steps=6")
    stages = (
        "+trainer.sequence_warmup={a:{until_step:2,sequence:8},b:{until_step:4,sequence:16}}",
        "trainer.validate_first=true",
    )
    run, constant = run_job(*options, *stages), run_job(*options, *stages[1:])
    for key in ("train/lr", "step"):
        assert run.column(key) == constant.column(key), key
    assert run.summary["metrics"]["val/loss_first"] == constant.summary["metrics"]["val/loss_first"]
    lengths = [8, 8, 16, 16, 32, 32]
    assert run.column("train/sequence") == lengths
    assert run.column("train/global_batch") == []
    tokens = 4 * np.array(lengths)
    assert run.column("train/tokens") == np.cumsum(tokens).tolist()
    seconds = np.array(run.column("time/step_s"))
    rates = np.array(run.column("throughput/tokens_per_s"))
    np.testing.assert_allclose(rates * seconds, tokens, rtol=1e-6)
    flops = np.array(run.column("throughput/tflops_per_s_per_device")) * seconds * 1e12
    expected = [
        compose([*UNTRACKED, f"data.sequence={length}"]).flops_per_token for length in lengths
    ]
    np.testing.assert_allclose(flops, tokens * np.array(expected), rtol=1e-6)
    assert run.summary["window"] == "median of steps 5-6"  # those of the final length
    assert run.summary["sequence"] == 32


@pytest.mark.parametrize(
    "parallelism",
    [
        "single",
        *(pytest.param(it, marks=EXHAUSTIVE) for it in ("context", "ddp", "fsdp", "pipeline")),
    ],
)
def test_peak_memory_is_that_of_the_final_length(
    parallelism: str, tmp_path: Path, shared_cache: Path
) -> None:
    stage = "+trainer.sequence_warmup={first:{until_step:4,sequence:16}}"
    overrides = (*SMALL, f"parallelism={parallelism}", "trainer.max_steps=6")
    predicted = peak_memory.worst_rank_breakdown(compose([*overrides, stage])).peak
    assert predicted == peak_memory.worst_rank_breakdown(compose(overrides)).peak
    metrics = (
        JobRunner(tmp_path, shared_cache).without_defaults(*overrides, stage).summary["metrics"]
    )
    assert metrics["plan/peak_bytes"] == predicted
    assert abs(predicted / metrics["memory/peak_bytes"] - 1) < 0.02


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", ["block", "whole"])
def test_compiled_modules_are_compiled_for_each_length(
    compiled: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    options = (f"compile={compiled}", "compile.backend=aot_eager")
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(("parallelism=ddp",), "accumulated", run_job, *WARMUP, *options)
    assert_same_training(run, reference_run("accumulated", *WARMUP))


SAMPLES_OF_STEPS = StepCounts(12, ((2, 4), (5, 8)))
LENGTHS_OF_STEPS = StepCounts(32, ((1, 8), (4, 16)))
STEPS = 6


@pytest.mark.parametrize("options", [(), ("data.masked=0.5",), ("data.packing=true",)], ids=str)
@pytest.mark.parametrize("start", [0, 3])
def test_batches_are_truncated_at_the_end(options: tuple[str, ...], start: int) -> None:
    run = compose([*TINY_DECODER, *LLAMA, *options])
    dataset = prepare_splits(run.data, run.model.vocabulary, run.seed).train
    share = BatchShare(12, 2, 1, 2, SAMPLES_OF_STEPS.stages)
    first = share.micro_batches_per_step.before(start)
    loaders = [
        TrainLoader(dataset, it, seed=1, steps=STEPS, start=first)
        for it in (share, replace(share, sequence_per_step=LENGTHS_OF_STEPS))
    ]
    number, labels_of_step = first, []
    for number, (full, batch) in enumerate(zip(*loaders, strict=True), first):
        step, offset = share.micro_batches_per_step.locate(number)
        length = LENGTHS_OF_STEPS.at(step)
        for name in {*full} - {"labels_of_step"}:
            assert batch[name].shape == (2, length), (name, number)
            assert torch.equal(batch[name], full[name][:, :length]), (name, number)
        if offset == 0:
            labels_of_step.append([batch.get("labels_of_step"), 0])
        labels_of_step[-1][1] += int((batch["labels"] != IGNORED).sum())
    assert number + 1 == share.micro_batches_per_step.before(STEPS)
    assert len(labels_of_step) == STEPS - start
    if dataset.masked:
        assert all(counted == labels for counted, labels in labels_of_step)
