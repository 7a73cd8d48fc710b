"""Hint of a plan with a low MFU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scalewise.planner.bottleneck import bottleneck_hint
from scalewise.planner.plan import Plan

RUN = ("model=llama3_1b", "hardware=h100_8", "data=synthetic", "data.sequence=2048")
MIXED = ("precision=bf16_mixed", "trainer.micro_batch=4")
TENSOR = ("parallelism=mesh", "parallelism.tensor=8", "hardware.link_gb_per_s=10")
PIPELINE = ("parallelism=mesh", "parallelism.pipeline=8", "parallelism.pipeline_micro_batches=8")


@pytest.mark.parametrize(
    ("overrides", "part", "advice"),
    [
        (TENSOR, "communication over tensor", "fewer ranks on this axis"),
        ((*PIPELINE, "trainer.micro_batch=8"), "pipeline bubble", "pipeline_micro_batches"),
        (("optimizer=adamw", "data.sequence=32"), "optimizer", "larger trainer.global_batch"),
        (("hardware.loader_tokens_per_s=20000",), "data loading", "faster disk"),
        (
            ("precision=fp32", "hardware.product_share=0.1", "hardware.fp32_reached_tflops=5"),
            "matmuls",
            "precision=bf16_mixed, whose peak rate is 14.8 times",
        ),
    ],
)
def test_low_mfu_names_the_largest_part(
    overrides: tuple[str, ...], part: str, advice: str, plan_of: Callable[..., Plan]
) -> None:
    hint = bottleneck_hint(plan_of(*RUN, *MIXED, *overrides))
    assert hint is not None
    assert part in hint
    assert advice in hint


def test_high_mfu_and_cpu_runs_have_no_hint(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(*RUN, *MIXED)
    assert plan.mfu is not None
    assert plan.mfu > 0.3
    assert bottleneck_hint(plan) is None
    assert bottleneck_hint(plan_of("hardware=cpu")) is None


def test_low_mfu_by_padding_names_the_micro_batch(plan_of: Callable[..., Plan]) -> None:
    fsdp = ("parallelism=fsdp", "parallelism.shards=8", "trainer.global_batch=8")
    hint = bottleneck_hint(plan_of(*RUN, *MIXED, *fsdp))
    assert hint is not None
    assert "75% of the samples of a step are padding; set trainer.micro_batch=1" in hint
    followed = bottleneck_hint(plan_of(*RUN, *MIXED, *fsdp, "trainer.micro_batch=1"))
    assert followed is None or "padding" not in followed
