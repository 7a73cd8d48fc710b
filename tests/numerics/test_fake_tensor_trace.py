"""The memory breakdown compared with FakeTensor traces, also for large world sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from scalewise.bench.memory_accuracy import (
    ACCUMULATION,
    LARGE,
    TRACED,
    TRACED_SELDOM,
    pipeline_overrides,
)
from scalewise.bench.memory_accuracy_runs import FULL, MIXED, fsdp_overrides, mesh_overrides
from scalewise.planner import peak_memory
from scalewise.planner.memory_breakdown import StepPhase
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.run_config import RunConfig
from scalewise.tracing.step_trace import rejection_reason, trace_run, with_cpu_operators

Compose = Callable[..., RunConfig]

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture
def run_of(compose: Compose) -> Compose:
    return lambda *overrides: compose(*LARGE, *overrides, check_machine=False)


@pytest.mark.parametrize(
    "overrides",
    [
        *TRACED,
        *(pytest.param(case_overrides, marks=EXHAUSTIVE) for case_overrides in TRACED_SELDOM),
    ],
    ids=" ".join,
)
def test_memory_breakdown_equals_trace(overrides: tuple[str, ...], run_of: Compose) -> None:
    run = run_of(*overrides)
    assert rejection_reason(run) is None
    trace, predicted = trace_run(run), peak_memory.worst_rank_breakdown(with_cpu_operators(run))
    error = predicted.peak / trace.peak - 1
    peak_phase = max(trace.phase_peaks, key=lambda moment: trace.phase_peaks[moment])
    print(f"{' '.join(overrides)}: {error:+.2%}, {trace.peak:,} at {peak_phase}")
    assert abs(error) < 0.05
    assert not dist.is_initialized()


SMALL_FSDP = (
    "model=decoder_nano",
    "model.layers=5",
    "data=synthetic",
    "data.sequence=128",
    "trainer.micro_batch=2",
    "trainer.global_batch=null",
    "objective.loss_chunk=64",
    MIXED,
    FULL,
    *fsdp_overrides(8),
)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_prefetch_distance_is_the_number_of_blocks_gathered_ahead(
    prefetch: int, compose: Compose
) -> None:
    wide_blocks = ("model.vocabulary=256", "model.width=128", "model.feedforward=1024")
    run = compose(
        *SMALL_FSDP, *wide_blocks, f"parallelism.prefetch={prefetch}", check_machine=False
    )
    predicted = peak_memory.worst_rank_breakdown(run).peak
    assert predicted == pytest.approx(trace_run(run, full_depth=True).peak, rel=0.001)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_embedding_and_head_are_gathered_and_reduced_by_themselves(
    tied: str, compose: Compose
) -> None:
    large_ends = ("model.vocabulary=8192", "model.width=128", f"model.tied={tied}")
    run = compose(*SMALL_FSDP, *large_ends, check_machine=False)
    trace, breakdown = trace_run(run, full_depth=True), peak_memory.worst_rank_breakdown(run)
    assert breakdown.peak == pytest.approx(trace.peak, rel=0.005)
    if tied == "false":
        for phase, name in ((StepPhase.reduce_head, "head"), (StepPhase.reduce_rest, "block 0")):
            assert breakdown.phases[phase] == pytest.approx(trace.phase_peaks[name], rel=0.001)


def test_trace_counts_the_moving_average_on_each_rank(run_of: Compose) -> None:
    overrides = (MIXED, *fsdp_overrides(8), FULL)
    default_trace, averaged = (
        trace_run(run_of(*overrides)),
        trace_run(run_of(*overrides, "callbacks=[ema]")),
    )
    run = run_of(*overrides, "callbacks=[ema]")
    expected = build_rank_memory(run.parallelism, run).ema_bytes(run)
    assert averaged.peak - default_trace.peak == pytest.approx(expected, rel=0.001)
    average_bytes = averaged.probe_metrics["memory/average_bytes"]
    assert average_bytes == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize(
    ("layers", "overrides"),
    [
        (12, (MIXED, FULL)),
        *(
            pytest.param(layers, case_overrides, marks=EXHAUSTIVE)
            for layers, case_overrides in [
                (12, (MIXED, *fsdp_overrides(8), ACCUMULATION)),
                (12, (MIXED, *fsdp_overrides(4), "model=openllama_7b", "data.sequence=2048")),
                (12, (MIXED, *mesh_overrides(tensor=8))),
                (12, (MIXED, *mesh_overrides(shards=16, tensor=8), FULL)),
                (24, (MIXED, *pipeline_overrides(shards=2))),
            ]
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_trace_of_a_shallow_model_predicts_the_deep_one(
    layers: int, overrides: tuple[str, ...], run_of: Compose
) -> None:
    run = run_of(*overrides, f"model.layers={layers}")
    assert trace_run(run).peak == pytest.approx(trace_run(run, full_depth=True).peak, rel=0.02)


def test_compiled_run_is_traced_in_eager_mode(run_of: Compose) -> None:
    eager, compiled = (trace_run(run_of(MIXED, f"compile={scope}")) for scope in ("none", "block"))
    assert compiled.peak == eager.peak


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("parallelism=ddp", "parallelism.replicas=8"), "ddp requires real memory"),
        (("parallelism=deepspeed_zero3",), "deepspeed requires real memory"),
        (("precision=fp16_mixed",), "CPU operators, which do not support fp16"),
        ((*fsdp_overrides(8), "parallelism.cpu_offload=true"), "offloading copies real memory"),
    ],
)
def test_untraceable_run_says_why(overrides: tuple[str, ...], reason: str, run_of: Compose) -> None:
    assert reason in (rejection_reason(run_of(*overrides)) or "")
