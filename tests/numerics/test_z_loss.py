"""z-loss under every strategy, whole and in chunks, compared with one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import ReferenceRun, assert_same_training, train_strategy
from fixtures.strategies import STRATEGIES, marks

Z_LOSS = ("objective.z_loss=0.1",)
"""Large enough to change losses and gradients by more than the tolerance."""
CHUNKED = (*Z_LOSS, "objective.loss_chunk=24")
CI_CASES = (
    ("ddp", Z_LOSS),
    ("fsdp", Z_LOSS),
    ("tensor", Z_LOSS),
    ("tensor", CHUNKED),
    ("tensor_no_sequence_parallel", Z_LOSS),
    ("context", CHUNKED),
    ("pipeline_one_f_one_b", Z_LOSS),
    ("deepspeed_zero2", Z_LOSS),
)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(
            strategy,
            options,
            marks=(
                *marks(strategy),
                *(() if (strategy, options) in CI_CASES else (pytest.mark.exhaustive,)),
            ),
            id=f"{strategy}{'-chunked' * (options is CHUNKED)}",
        )
        for strategy in STRATEGIES
        for options in (Z_LOSS, CHUNKED)
    ],
)
def test_z_loss_under_a_strategy_equals_one_device(
    strategy: str,
    options: tuple[str, ...],
    reference_run: ReferenceRun,
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    run_job = JobRunner(tmp_path, shared_cache)
    run = train_strategy(STRATEGIES[strategy], "combined", run_job, *options)
    reference = reference_run("combined", *Z_LOSS)
    assert_same_training(run, reference)
    without = reference_run("combined")
    assert min(reference.column("train/loss")) > max(without.column("train/loss")) + 0.1
