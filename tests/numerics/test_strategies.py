"""Every strategy compared with one device: losses, gradients and weights in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import BATCHES, ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import (
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GPT_NEOX,
    MUP,
    OLMO2,
    OPTION_PRODUCTS,
    PHI,
    SCHEDULE_PRODUCTS,
    STRATEGIES,
    marks,
)

CI_BATCHES = ("combined",)
EXHAUSTIVE_STRATEGIES = (
    "fsdp_4",
    "replicate_tensor",
    "context_tensor",
    "pipeline_context",
    "pipeline_replicate",
)
EXHAUSTIVE_STRATEGIES += (
    "tensor_no_sequence_parallel",
    "ddp_small_buckets",
    "fsdp_prefetch",
    "context_unbalanced",
    "fsdp_zero1",
)
EXHAUSTIVE_STRATEGIES += (
    "fsdp_zero2",
    "pipeline_gpipe",
    "pipeline_interleaved_1f1b",
    "shard_context",
)
EXHAUSTIVE_STRATEGIES += (
    "replicate_shard",
    "pipeline_shard",
    "context_gather",
    "pipeline_interleaved_zero_bubble",
)
EXHAUSTIVE_STRATEGIES += ("deepspeed_zero1", "deepspeed_zero2")
"""Products beyond those that are promised, and variants that are in CI through others."""

CASES = [
    pytest.param(
        strategy,
        batch,
        marks=(*marks(strategy), *(() if runs_in_ci else (pytest.mark.exhaustive,))),
    )
    for strategy in STRATEGIES
    for batch in BATCHES
    for runs_in_ci in [batch in CI_BATCHES and strategy not in EXHAUSTIVE_STRATEGIES]
]


@pytest.mark.parametrize(("strategy", "batch"), CASES)
def test_strategy_equals_one_device(
    strategy: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(STRATEGIES[strategy], batch, JobRunner(tmp_path, shared_cache))
    assert_same_training(run, reference_run(batch))


ARCHITECTURES = {
    "deepseek": DEEPSEEK,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "mup": MUP,
    "olmo2": OLMO2,
    "phi": PHI,
}
"""Options of the decoder by name, on the accumulated batch of a Llama."""
CI_ARCHITECTURES = (("gemma2", "shard_tensor"), ("gemma3", "tensor"), ("gemma3", "context_gather"))
CI_ARCHITECTURES += (("phi", "shard_tensor"), ("deepseek", "fsdp"), ("mup", "shard_tensor"))


@pytest.mark.parametrize(
    ("architecture", "strategy"),
    [
        pytest.param(architecture, strategy, marks=() if runs_in_ci else pytest.mark.exhaustive)
        for architecture in ARCHITECTURES
        for strategy in (
            "tensor",
            "tensor_no_sequence_parallel",
            "shard_tensor",
            "context",
            "context_gather",
            "pipeline_one_f_one_b",
            "fsdp",
        )
        # The norm of OLMo 2, and latents, belong to all heads; a rank has some of them.
        if not (architecture in ("olmo2", "deepseek") and "tensor" in strategy)
        for runs_in_ci in [(architecture, strategy) in CI_ARCHITECTURES]
    ],
)
def test_architecture_under_a_strategy_equals_one_device(
    architecture: str,
    strategy: str,
    reference_run: ReferenceRun,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    options, run_job = ARCHITECTURES[architecture], JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "accumulated", run_job, *options)
    assert_same_training(run, reference_run("accumulated", *options))


ALL_PRODUCTS = SCHEDULE_PRODUCTS | OPTION_PRODUCTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", ["combined", "accumulated"])
@pytest.mark.parametrize("product", ALL_PRODUCTS)
def test_mesh_axes_and_options_equal_one_device(
    product: str, batch: str, reference_run: ReferenceRun, tmp_path: Path, shared_cache: Path
) -> None:
    run = train_strategy(ALL_PRODUCTS[product], batch, JobRunner(tmp_path, shared_cache))
    assert_same_training(run, reference_run(batch))
