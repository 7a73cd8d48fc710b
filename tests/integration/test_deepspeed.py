"""DeepSpeed runs: offload, bf16, checkpoints across strategies and bitwise resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir, same_weights
from fixtures.job_runner import JobRunner
from fixtures.strategies import LLAMA, TINY_DECODER, needs_deepspeed, needs_libaio

from scalewise import compose
from scalewise.checkpoints import store
from scalewise.models.build import build_model

pytestmark = needs_deepspeed

STEPS = 6
ADAMW = (
    *TINY_DECODER,
    *LLAMA,
    "schedule=constant",
    "schedule.warmup_steps=0",
    "optimizer.lr=1e-2",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.validate_every=3",
    "trainer.validation_rows=5",
    "trainer.global_batch=11",
    "trainer.micro_batch=2",
    "trainer.clip_norm=0.5",
    "data.masked=0.3",
)
SGD = (*ADAMW, "optimizer=sgd", "optimizer.lr=0.3")
LARGER_MODEL = ("model.width=128", "model.feedforward=512", "model.layers=6")
"""More than 1 MiB of master weights per rank: DeepSpeed keeps smaller ones in memory."""

EXHAUSTIVE = pytest.mark.exhaustive
"""Compiles extensions for up to three minutes, and trains larger models."""

OFFLOAD_STRATEGIES = {
    "deepspeed_zero1_offload": ("parallelism=deepspeed_zero1", "parallelism.offload_optimizer=cpu"),
    "deepspeed_zero2_offload": ("parallelism=deepspeed_zero2_offload",),
    "deepspeed_zero3_offload": ("parallelism=deepspeed_zero3_offload",),
    "deepspeed_zero3_nvme": (
        "parallelism=deepspeed_zero3_nvme",
        "parallelism.keep_whole_below=100",
    ),
}
OFFLOAD_PARAMS = [
    pytest.param(kind, marks=(needs_libaio, EXHAUSTIVE) if "nvme" in kind else EXHAUSTIVE)
    for kind in OFFLOAD_STRATEGIES
]
ZERO_STAGES = {
    "zero1": ("parallelism=deepspeed_zero1",),
    "zero2": ("parallelism=deepspeed_zero2",),
    "zero3": ("parallelism=deepspeed_zero3", "parallelism.keep_whole_below=100"),
}
HIERARCHICAL_PARTITION = "parallelism.hierarchical=2"
ZERO3_FOUR_RANKS = (*ZERO_STAGES["zero3"], "parallelism.replicas=4")
EACH_CHECKPOINT = ("checkpoint.every=1", "checkpoint.keep=0")
BF16 = {
    f"{stage}_{precision}": (*overrides, f"precision={precision}")
    for stage, overrides in ZERO_STAGES.items()
    for precision in ("bf16_mixed", "bf16_true")
}
RunOf = Callable[..., RunDir]


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path, shared_cache)


@pytest.mark.usefixtures("compiled_extensions")
@pytest.mark.parametrize("strategy", OFFLOAD_PARAMS)
def test_deepspeed_offload_equals_one_device(strategy: str, run_job: JobRunner) -> None:
    """Uses AdamW: DeepSpeed has no other optimizer for the host, so that SGD is not covered.

    AdamW hides the scale of a gradient; its norm, which is compared as well, does not, and nor
    does a large epsilon, which also prevents AdamW from amplifying rounding errors.
    """
    overrides = (*ADAMW, "optimizer.epsilon=1e-3", *(LARGER_MODEL if "nvme" in strategy else ()))
    single_run = run_job.without_defaults(
        *overrides, "parallelism=single", "trainer.micro_batch=11"
    )
    run = run_job.without_defaults(*overrides, *OFFLOAD_STRATEGIES[strategy])
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == pytest.approx(single_run.column(key), rel=1e-5), key
    assert_close(run.weights(), single_run.weights())


@pytest.mark.parametrize(
    "kind",
    [
        "zero3",  # the stage that partitions most
        *(pytest.param(kind, marks=EXHAUSTIVE) for kind in ("zero1", "zero2", *BF16)),
        *OFFLOAD_PARAMS,
    ],
)
def test_deepspeed_resume_is_bitwise_equal(
    kind: str, run_job: JobRunner, request: pytest.FixtureRequest
) -> None:
    larger_overrides = LARGER_MODEL if "nvme" in kind else ()
    overrides = (*{**ZERO_STAGES, **BF16, **OFFLOAD_STRATEGIES}[kind], *larger_overrides)
    if kind in OFFLOAD_STRATEGIES:
        request.getfixturevalue("compiled_extensions")
    run = run_job.without_defaults(*ADAMW, *overrides, "checkpoint.every=3", "checkpoint.keep=0")
    resumed = run_job.without_defaults(*ADAMW, *overrides, resume=run.checkpoint(3))
    assert_same_steps(resumed, run, kind)


@pytest.mark.exhaustive
def test_hierarchical_partition_resumes_like_plain_stage_3(run_job: JobRunner) -> None:
    """Validates and saves after each step: both gather the same weights."""
    overrides = (*ADAMW, *ZERO3_FOUR_RANKS, "trainer.validate_every=1", *EACH_CHECKPOINT)
    stage_3_run = run_job.without_defaults(*overrides)
    resumed = run_job.without_defaults(
        *overrides, HIERARCHICAL_PARTITION, resume=stage_3_run.checkpoint(2)
    )
    assert_same_steps(resumed, stage_3_run, "resumed")


@EXHAUSTIVE
def test_hierarchical_partition_loads_frozen_weights(run_job: JobRunner) -> None:
    """Frozen weights that differ from the initial ones, as in a user module without a seed."""
    overrides = (*ADAMW, *ZERO3_FOUR_RANKS, "adapter=lora", *EACH_CHECKPOINT)
    path = run_job.without_defaults(*overrides).checkpoint(2)
    packed_state = store.pack_state(store.load_state(path))
    tensors = {
        state_kind: store.full_tensors(path, state_kind) for state_kind in ("model", "optimizer")
    }
    trained_names = {key.partition("/")[2] for key in tensors["optimizer"]}
    frozen = tensors["model"].keys() - trained_names
    assert frozen
    for name in frozen:
        tensors["model"][name] *= 3
    shutil.rmtree(path)
    store.save_checkpoint(path, tensors, packed_state)
    stage_3_run = run_job.without_defaults(*overrides, resume=path)
    assert_same_steps(
        run_job.without_defaults(*overrides, HIERARCHICAL_PARTITION, resume=path),
        stage_3_run,
        "frozen weights",
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp", "deepspeed_zero3"),
        *(
            pytest.param(*pair, marks=EXHAUSTIVE)
            for pair in (
                ("deepspeed_zero1", "single"),
                ("single", "deepspeed_zero1"),
                ("ddp", "deepspeed_zero2"),
                ("deepspeed_zero2", "fsdp"),
                ("deepspeed_zero3", "tensor"),
                ("deepspeed_zero3", "deepspeed_zero1"),
            )
        ),
    ],
)
def test_deepspeed_checkpoint_resumes_under_other_strategies(
    before: str, after: str, run_job: JobRunner
) -> None:
    full_run = run_job.without_defaults(
        *SGD, "parallelism=single", "checkpoint.every=3", "checkpoint.keep=0"
    )
    first = run_job.without_defaults(
        *SGD, f"parallelism={before}", "checkpoint.every=3", "checkpoint.keep=0"
    )
    files = {file.parent.name for file in first.checkpoint(3).rglob("*.safetensors")}
    assert files == {"model", "optimizer"}
    resumed_run = run_job.without_defaults(*SGD, f"parallelism={after}", resume=first.checkpoint(3))
    assert resumed_run.column("train/loss") == pytest.approx(
        full_run.column("train/loss"), rel=1e-5
    )
    assert_close(resumed_run.weights(STEPS), full_run.weights(STEPS))
    for name, state in store.full_tensors(full_run.checkpoint(STEPS), "optimizer").items():
        actual = store.full_tensors(resumed_run.checkpoint(STEPS), "optimizer")[name]
        scale = float(state.abs().max())
        torch.testing.assert_close(actual, state, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=EXHAUSTIVE) for n in (1, 2)), 3])
def test_fp32_master_weights_equal_initial_weights(stage: int, run_job: JobRunner) -> None:
    overrides = (*SGD, f"parallelism=deepspeed_zero{stage}", "precision=bf16_mixed")
    run = run_job.without_defaults(
        *overrides, "optimizer.lr=1e-30", "trainer.max_steps=1", "data.masked=0.0"
    )
    initial_model = build_model(compose(SGD).model, seed=compose(SGD).seed)
    expected = {f"model.{name}": tensor for name, tensor in initial_model.state_dict().items()}
    assert same_weights(run.weights(1), expected)


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=EXHAUSTIVE) for n in (1, 2)), 3])
def test_zero_partition_memory_is_exact(stage: int, run_job: JobRunner) -> None:
    run = run_job.without_defaults(*ADAMW, *ZERO_STAGES[f"zero{stage}"], "trainer.max_steps=3")
    metrics, model = run.summary["metrics"], compose(ADAMW).model
    weights, partition_bytes = 4 * model.num_parameters, 2 * model.num_parameters  # two ranks
    buffers = sum(b.numel() * b.element_size() for b in build_model(model, seed=1).buffers())
    norms = sum(4 * weight.numel for weight in model.weight_census() if weight.numel < 100)
    weight_bytes = (
        weights if stage < 3 else partition_bytes + norms
    )  # stage 3 does not partition small parameters
    master_bytes = partition_bytes
    assert metrics["memory/parameters_bytes"] == weight_bytes + master_bytes + buffers
    assert metrics["memory/gradients_bytes"] == pytest.approx(partition_bytes, abs=64)  # padded
    assert metrics["memory/optimizer_bytes"] == pytest.approx(
        2 * partition_bytes, abs=64
    )  # and steps


def test_stage_3_gradients_outside_of_a_buffer_are_the_same(run_job: JobRunner) -> None:
    stage_3 = (*ADAMW, *ZERO_STAGES["zero3"], "trainer.max_steps=3")
    contiguous, in_place = (
        run_job.without_defaults(*stage_3, f"parallelism.contiguous_gradients={value}")
        for value in ("true", "false")
    )
    assert same_weights(in_place.weights(), contiguous.weights())
    peaks = [run.summary["metrics"]["memory/peak_bytes"] for run in (in_place, contiguous)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize(
    "precision",
    ["bf16_mixed", *(pytest.param(it, marks=EXHAUSTIVE) for it in ("fp32", "bf16_true"))],
)
def test_stage_3_recomputes_selectively(precision: str, run_job: JobRunner) -> None:
    """The backward pass gathers other modules than the forward pass, which prefetches."""
    stage_3 = (*ADAMW, *ZERO_STAGES["zero3"], "trainer.max_steps=3", f"precision={precision}")
    stored, recomputed = (
        run_job.without_defaults(*stage_3, f"memory={memory}")
        for memory in ("none", "checkpoint_selective")
    )
    assert same_weights(recomputed.weights(), stored.weights())
    peaks = [run.summary["metrics"]["memory/peak_bytes"] for run in (recomputed, stored)]
    assert peaks[0] < peaks[1]


@EXHAUSTIVE
@pytest.mark.parametrize("kind", BF16)
def test_deepspeed_bf16_loss_is_near_fp32(kind: str, run_job: JobRunner) -> None:
    """Within 2 % of the fp32 loss of the same steps."""
    steps = ("trainer.max_steps=40", "optimizer.lr=3e-3")
    fp32_run = run_job.without_defaults(*ADAMW, *steps, "parallelism=single")
    run = run_job.without_defaults(*ADAMW, *steps, *BF16[kind])
    assert run.column("train/loss")[-1] == pytest.approx(
        fp32_run.column("train/loss")[-1], rel=0.02
    )


def assert_same_steps(run: RunDir, expected: RunDir, case: str) -> None:
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert run.column(key) == expected.column(key), (case, key)
    for state_kind in ("model", "optimizer"):
        final_tensors = [
            store.full_tensors(compared_run.checkpoint(STEPS), state_kind)
            for compared_run in (run, expected)
        ]
        assert same_weights(*final_tensors), (case, state_kind)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-5 * scale)
