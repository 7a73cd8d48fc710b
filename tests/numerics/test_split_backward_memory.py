"""Predicted memory of zero-bubble pipelines compared with measured peaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.job_runner import JobRunner

from scalewise import compose
from scalewise.bench.memory_accuracy_runs import MIXED, SMALL, mesh_overrides
from scalewise.planner import peak_memory

EXHAUSTIVE = pytest.mark.exhaustive
SCHEDULES = ("interleaved_zero_bubble", "zbv_zero_bubble")
SIZES = ("model.vocabulary=256", "trainer.micro_batch=8", "parallelism.pipeline_micro_batches=4")
"""Activations that need more memory than weights and logits."""
EXPERTS = ("model.experts=4", "model.expert_dim=96", "model.shared_experts=1")
LARGE_WEIGHTS = ("model.width=256", "data.sequence=16", "model.layers=8")
"""Few tokens and large weights, so that gradients of weights determine the peak."""
EIGHT_MICRO_BATCHES = ("parallelism.pipeline_micro_batches=8",)
IN_CI = (("interleaved_zero_bubble", EXPERTS), ("zbv_zero_bubble", ()))
SELDOM = (
    ("model.layers=12",),
    EIGHT_MICRO_BATCHES,
    (*EXPERTS, *EIGHT_MICRO_BATCHES),
    (*EXPERTS, "model.layers=8"),
    (MIXED, "model.layers=8"),
    ("model.norm=layernorm", "model.position=learned", "model.activation=gelu", "model.bias=true"),
    ("model.dropout=0.1",),
    ("model.vocabulary=4096",),
    ("adapter=lora", "model.layers=8"),
    (*LARGE_WEIGHTS, *EIGHT_MICRO_BATCHES),
    (*LARGE_WEIGHTS, "trainer.global_batch=16"),
)
"""Options of cases that the exhaustive tests measure under both schedules."""
MESHES = ({"shards": 2}, {"tensor": 2}, {"context": 2})
"""Axes next to the pipeline."""


@pytest.mark.parametrize(
    ("schedule", "overrides"),
    [
        pytest.param(
            schedule, overrides, marks=() if (schedule, overrides) in IN_CI else EXHAUSTIVE
        )
        for schedule in SCHEDULES
        for overrides in ((), EXPERTS, *SELDOM)
    ],
)
def test_peak_memory_of_split_backward_equals_prediction(
    schedule: str, overrides: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    pipeline = ("parallelism=pipeline", f"parallelism.pipeline_schedule={schedule}")
    run = (*SMALL, *SIZES, *pipeline, *overrides)
    predicted = peak_memory.worst_rank_breakdown(compose(run))
    folder = JobRunner(tmp_path, shared_cache).without_defaults(*run)
    error = predicted.peak / folder.summary["metrics"]["memory/peak_bytes"] - 1
    print(f"{schedule} {' '.join(overrides)}: {error:+.2%} at {predicted.peak_phase}")
    assert abs(error) < 0.02


@EXHAUSTIVE
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("overrides", [(), LARGE_WEIGHTS, (*LARGE_WEIGHTS, MIXED)], ids=" ".join)
def test_peak_memory_of_split_backward_with_another_axis_equals_prediction(
    schedule: str,
    sizes: dict[str, int],
    overrides: tuple[str, ...],
    tmp_path: Path,
    shared_cache: Path,
) -> None:
    mesh = (*mesh_overrides(pipeline=2, **sizes), *overrides)
    test_peak_memory_of_split_backward_equals_prediction(schedule, mesh, tmp_path, shared_cache)
