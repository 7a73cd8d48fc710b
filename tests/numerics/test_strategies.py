"""Every strategy compared with one device: losses, gradients and weights in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import OPTION_PRODUCTS, SCHEDULE_PRODUCTS, STRATEGIES, marks

USUAL = ("all_at_once",)
SELDOM = ("fsdp_4", "replicate_tensor", "context_tensor", "pipeline_context", "pipeline_replicate")
SELDOM += ("tensor_alone", "ddp_small_buckets", "fsdp_prefetch", "context_in_order", "fsdp_kept")
SELDOM += ("fsdp_zero2", "pipeline_gpipe", "pipeline_interleaved_1f1b", "shard_context")
SELDOM += (
    "replicate_shard",
    "pipeline_shard",
    "context_gather",
    "pipeline_interleaved_zero_bubble",
)
SELDOM += ("deepspeed_zero1", "deepspeed_zero2")
"""Products beyond those that are promised, and variants that are in CI through others."""

CASES = [
    pytest.param(
        strategy,
        batch,
        marks=(*marks(strategy), *(() if usual else (pytest.mark.exhaustive,))),
    )
    for strategy in STRATEGIES
    for batch in BATCHES
    for usual in [batch in USUAL and strategy not in SELDOM]
]


@pytest.mark.parametrize(("strategy", "batch"), CASES)
def test_strategy_equals_one_device(
    strategy: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(STRATEGIES[strategy], batch, JobRunner(tmp_path, shared_cache))
    assert_same_training(run, reference_run(batch))


PRODUCTS = SCHEDULE_PRODUCTS | OPTION_PRODUCTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", ["all_at_once", "accumulated"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_mesh_axes_and_options_equal_one_device(
    product: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(PRODUCTS[product], batch, JobRunner(tmp_path, shared_cache))
    assert_same_training(run, reference_run(batch))
