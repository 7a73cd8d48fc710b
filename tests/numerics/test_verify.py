"""``scalewise verify``: strategies equal one device, and planted faults are found and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from fixtures.strategies import LLAMA, TINY_DECODER

from scalewise import compose
from scalewise.launch import processes
from scalewise.verify.reduced_run import reduce_run
from scalewise.verify.runner import Verification, verify_run

EXHAUSTIVE = pytest.mark.exhaustive
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
    [pytest.param(("parallelism=ddp",), marks=EXHAUSTIVE), ("parallelism=fsdp",)],
)
def test_strategy_without_fault_is_equal(strategy: tuple[str, ...], verify: Verify) -> None:
    assert_equal(verify(*ACCUMULATED, *strategy))


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
