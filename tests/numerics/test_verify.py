"""``scalewise verify``: strategies equal one device, and planted faults are found and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from fixtures.compatibility_matrix import USER_MODULE
from fixtures.hf_checkpoints import RANDOM_BLIP2, RANDOM_LLAMA, RANDOM_T5
from fixtures.strategies import LLAMA, TINY_DECODER, ZERO_BUBBLE_SHARDS, mesh, needs_deepspeed

from scalewise import compose
from scalewise.launch import processes
from scalewise.verify.reduced_run import reduce_run
from scalewise.verify.runner import Verification, verify_run

EXHAUSTIVE = pytest.mark.exhaustive
BF16 = "precision=bf16_mixed"
ACCUMULATED = (
    *TINY_DECODER,
    *LLAMA,
    "trainer.micro_batch=2",
    "trainer.global_batch=7",
    "data.masked=0.3",
    "verify.steps=2",
)
"""An uneven global batch in two micro-batches per rank, with masked labels."""

Verify = Callable[..., Verification]


@pytest.fixture
def verify(tmp_path: Path, shared_cache: Path) -> Verify:
    """Function that compares the strategy of a command line with one device."""

    def verify_overrides(*overrides: str) -> Verification:
        small = reduce_run(compose([*overrides], check_machine=False))
        processes.start_forkserver()
        with mock.patch.dict(os.environ, SCALEWISE_CACHE=str(shared_cache)):
            return verify_run(small, tmp_path, print)

    return verify_overrides


def fault(name: str) -> tuple[str, ...]:
    target = f"fixtures.strategy_faults.{name}"
    return ("trusted_packages=[fixtures]", f"+callbacks.fault._target_={target}")


def assert_equal(verification: Verification) -> None:
    differences = [it for each in verification.comparisons for it in each.differences]
    assert not differences, "\n".join([verification.cause, *map(str, differences[:5])])
    for comparison in verification.comparisons:
        for result in comparison.results:
            assert result.compared, result.quantity


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("parallelism=ddp",), marks=EXHAUSTIVE),
        ("parallelism=fsdp",),
        pytest.param(("parallelism=tensor", BF16), marks=EXHAUSTIVE),
        pytest.param(("parallelism=context", BF16), marks=EXHAUSTIVE),
        pytest.param(("parallelism=pipeline", BF16, "trainer.micro_batch=4"), marks=EXHAUSTIVE),
        pytest.param((*ZERO_BUBBLE_SHARDS, "trainer.micro_batch=4"), marks=EXHAUSTIVE),
        pytest.param((*mesh(context=2, tensor=2), BF16), marks=EXHAUSTIVE),
        pytest.param(("parallelism=hsdp", "precision=bf16_true"), marks=EXHAUSTIVE),
        pytest.param(("parallelism=fsdp", "adapter=lora", "quantization=nf4"), marks=EXHAUSTIVE),
        pytest.param(
            ("parallelism=ddp", "memory=checkpoint_full", "objective.loss_chunk=24"),
            marks=EXHAUSTIVE,
        ),
        *(
            pytest.param(
                (f"parallelism=deepspeed_zero{stage}",), marks=(needs_deepspeed, EXHAUSTIVE)
            )
            for stage in (2, 3)
        ),
    ],
)
def test_strategy_without_fault_is_equal(strategy: tuple[str, ...], verify: Verify) -> None:
    assert_equal(verify(*ACCUMULATED, *strategy))


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "fp32"),
        pytest.param("fsdp", "bf16_mixed", marks=EXHAUSTIVE),
        pytest.param("hsdp", "fp32", marks=EXHAUSTIVE),
    ],
)
def test_user_module_without_fault_is_equal(strategy: str, precision: str, verify: Verify) -> None:
    """One device accumulates the batches of the ranks."""
    overrides = (*USER_MODULE, "tracking=none", "+data.arguments.shuffle=true")
    verification = verify(*overrides, f"parallelism={strategy}", f"precision={precision}")
    assert_equal(verification)


@EXHAUSTIVE
@pytest.mark.parametrize("model", [RANDOM_LLAMA, RANDOM_T5, RANDOM_BLIP2])
def test_transformers_model_without_fault_is_equal(model: tuple[str, ...], verify: Verify) -> None:
    data = {
        RANDOM_T5: ("objective=seq2seq", "data=synthetic", "data.target_length=8"),
        RANDOM_BLIP2: ("objective=captioning", "data=shapes"),
    }
    overrides = data.get(model, ("data=synthetic",))
    sequence = "data.sequence=8" if model == RANDOM_BLIP2 else "data.sequence=32"
    assert_equal(verify(*model, *overrides, sequence, "tracking=none", "parallelism=fsdp"))


@pytest.mark.parametrize(
    ("name", "strategy", "quantity", "cause"),
    [
        (
            "WrongGradientScale",
            ("parallelism=ddp",),
            "gradients",
            "all gradients are 2 times those of one device, the number of data-parallel ranks: "
            "they are not divided by it",
        ),
        ("SkippedAllReduce", ("parallelism=ddp",), "gradients", "their all-reduce is missing"),
        (
            "MisShardedWeight",
            ("parallelism=tensor",),
            "initial weights",
            "are of another part of the weight; it is sharded or initialized wrongly",
        ),
        (
            "DoubleCountedLabel",
            ("parallelism=fsdp",),
            "loss",
            "a label is counted twice",
        ),
        (
            "DroppedMicroBatch",
            ("parallelism=ddp",),
            "gradients",
            "the gradient lacks micro-batch 0 of data-parallel rank 1: it is dropped",
        ),
    ],
)
def test_planted_fault_is_found_and_named(
    name: str, strategy: tuple[str, ...], quantity: str, cause: str, verify: Verify
) -> None:
    verification = verify(*ACCUMULATED, *strategy, *fault(name))
    assert verification.failed is not None, name
    assert verification.failed.differences[0].quantity == quantity
    assert cause in verification.cause
