"""Rules between the precision and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from scalewise.errors import ConfigIssue
from scalewise.parallelism.deepspeed import DeepSpeedConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import Precision
from scalewise.precision.config import DIM_MULTIPLE, Float8
from scalewise.run_config import RunConfig


@singledispatch
def precision_issues(precision: Precision, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the precision with other parts of the run: none."""
    yield from ()


@precision_issues.register(Float8)
def _fp8_issues(precision: Float8, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for devices, shapes and strategies that torchao's layers do not support."""
    parallelism, option = run.parallelism, run.option("precision")
    if run.hardware.fp8_tflops == 0:
        reason = f"{run.hardware.match or 'the device'} has no fp8 matmuls"
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if run.data.sequence % DIM_MULTIPLE:
        reason = f"is not divisible by {DIM_MULTIPLE}, which fp8 matmuls over tokens require"
        fix = f"set data.sequence={max(1, run.data.sequence // DIM_MULTIPLE) * DIM_MULTIPLE}"
        yield ConfigIssue("data.sequence", run.data.sequence, reason, fix)
    if not precision.fp8_layers(run.model):
        reason = f"the model has no linear layer with dimensions divisible by {DIM_MULTIPLE}"
        yield ConfigIssue("precision", option, reason, "set precision=bf16_mixed")
    if run.has_frozen_weights:
        adapter = run.option("adapter")
        reason = "freezes matrices, whose gradients torchao's fp8 layers compute all the same"
        yield ConfigIssue("adapter", adapter, reason, "set precision=bf16_mixed")
    if isinstance(parallelism, MeshConfig):
        for axis in ("tensor", "context"):
            if (ranks := parallelism.sizes.get(axis, 1)) > 1:
                reason = "would compute fp8 scales per rank instead of per tensor or row"
                fix = f"set parallelism=fsdp parallelism.{axis}=1"
                yield ConfigIssue(f"parallelism.{axis}", ranks, reason, fix)
    if isinstance(parallelism, DeepSpeedConfig):
        parallelism_option = run.option("parallelism")
        reason = "casts parameters itself and does not support fp8"
        yield ConfigIssue("parallelism", parallelism_option, reason, "set parallelism=fsdp")
