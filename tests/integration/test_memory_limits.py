"""Fit status of plans compared with runs under an enforced memory limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.cli_runner import CliRunner

from scalewise.planner.fit_check import FitStatus
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig
from scalewise.units import GIB

Compose = Callable[..., RunConfig]

WIDE_RUN = (
    "experiment=smoke",
    "tracking=none",
    "hardware=cpu",
    "model.width=1024",
    "model.feedforward=2816",
    "model.layers=6",
    "data.sequence=32",
    "trainer.micro_batch=1",
    "trainer.global_batch=null",
    "trainer.max_steps=2",
    "trainer.validate_every=null",
    "schedule.warmup_steps=0",
)
"""State of 1 GB, much larger than a process, and few samples."""
RUN_OVERRIDES = [
    (),
    ("precision=bf16_mixed", "checkpoint=none"),
    ("optimizer=sgd", "checkpoint=none"),
    ("parallelism=fsdp",),
    ("parallelism=ddp", "checkpoint=none"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides", RUN_OVERRIDES, ids=lambda case_overrides: " ".join(case_overrides) or "single"
)
def test_fit_status_agrees_with_enforced_memory_limit(
    overrides: tuple[str, ...], compose: Compose, run_cli: CliRunner
) -> None:
    run = compose(*WIDE_RUN, *overrides)
    unlimited_fit = build_plan(replace(run, launch=replace(run.launch, memory_limit_gib=1e3))).fit
    min_bytes, _, max_bytes = unlimited_fit.reserved
    for limit, fit_status, code in (
        (0.9 * min_bytes, FitStatus.out_of_memory, 3),
        (1.01 * max_bytes, FitStatus.fits, 0),
    ):
        launch = f"launch.memory_limit_gib={limit / GIB:.4f}"
        assert build_plan(compose(*WIDE_RUN, *overrides, launch)).fit.status is fit_status, limit
        result = run_cli(*WIDE_RUN, *overrides, launch, env={"OMP_NUM_THREADS": "1"})
        assert result.code == code, result.failure_report
