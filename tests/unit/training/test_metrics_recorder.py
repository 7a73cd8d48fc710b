"""The metrics recorder: ranks, phases, memory and terminal lines."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalewise.hardware import DeviceKind
from scalewise.measure.step_timer import StepTimer
from scalewise.metric_names import STEP_PHASES
from scalewise.planner.plan import build_plan, predicted_metrics
from scalewise.run_config import RunConfig
from scalewise.tracking import tables
from scalewise.training.callbacks import metrics_recorder
from scalewise.training.callbacks.metrics_recorder import (
    MetricsRecorder,
    peak_rank_memory,
    slowest_rank_times,
)
from scalewise.training.callbacks.profiler import Profiler
from scalewise.training.callbacks.progress_display import ProgressDisplay, format_window
from scalewise.training.fit import drop_cost_metrics
from scalewise.training.trainer import build_summary
from scalewise.units import format_bytes

Composed = Callable[..., RunConfig]
CPU = torch.device("cpu")
PIPELINE = {"data": 0.01, "forward_backward": 0.08, "optimizer": 0.01}
OTHER_PHASES = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}


def row(step: int, times: dict[str, float]) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": 1.0,
        "train/grad_norm": 1.0,
        "train/lr": 1e-3,
        "time/step_s": sum(times.values()),
        **{f"time/{name}_s": times.get(name) for name in STEP_PHASES},
    }


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], None]:
    """Simulate a second rank in this process."""

    def add(other_rank: torch.Tensor) -> None:
        monkeypatch.setattr(
            metrics_recorder,
            "_gather_ranks",
            lambda own_values: torch.stack([own_values, other_rank]),
        )

    return add


def test_recorder_uses_the_steps_of_one_rank(two_ranks: Callable[[torch.Tensor], None]) -> None:
    actual, expected = (
        torch.tensor([[1.0, 5.0], [4.0, 1.0]]),
        torch.tensor([[4.0, 3.0], [1.0, 4.0]]),
    )
    two_ranks(expected)
    assert slowest_rank_times(actual).tolist() == expected.tolist()


def test_recorder_on_one_device_uses_its_own_steps() -> None:
    assert slowest_rank_times(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]


def test_recorder_memory_is_that_of_the_largest_peak(
    two_ranks: Callable[[torch.Tensor], None],
) -> None:
    two_ranks(torch.tensor([1, 9]))
    actual = {"memory/parameters_bytes": 3, "memory/peak_bytes": 8}
    assert peak_rank_memory(actual, CPU) == {"memory/parameters_bytes": 1, "memory/peak_bytes": 9}


def test_recorder_omits_unmarked_phases() -> None:
    clock = StepTimer(CPU)
    for phase in ("data", "forward_backward", "optimizer"):
        clock.mark(phase)
    clock.end_step()
    assert [list(phase_times) for phase_times in clock.drain()] == [list(PIPELINE)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (PIPELINE, "100 ms (d 10% f+b 80% o 10%)"),
        (OTHER_PHASES, "100 ms (d 10% f 30% b 50% o 10%)"),
    ],
)
def test_recorder_line_shows_measured_phases(
    times: dict[str, float], expected: str, compose: Composed
) -> None:
    assert format_window([row(1, times), row(2, times)], compose(), 2).endswith(expected)


def test_recorder_line_shows_tokens_with_and_without_padding(compose: Composed) -> None:
    run = compose()
    rates = MetricsRecorder(run, 0, [], unpadded_fraction=0.25)._throughput_metrics(
        1, dict.fromkeys(PIPELINE, 0.1)
    )
    padded_rate, unpadded_rate = (
        rates[f"throughput/{name}"] for name in ("tokens_per_s", "unpadded_tokens_per_s")
    )
    assert unpadded_rate == pytest.approx(padded_rate / 4)
    window_line = format_window([row(1, PIPELINE) | rates], run, 2)
    assert f"{padded_rate:,.0f} tok/s ({unpadded_rate:,.0f} without padding)" in window_line
    throughput_metrics = MetricsRecorder(run, 0, [])._throughput_metrics(
        1, dict.fromkeys(PIPELINE, 0.1)
    )
    assert "padding" not in format_window([row(1, PIPELINE) | throughput_metrics], run, 2)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_recorder_line_compares_the_peak_with_the_plan(
    is_cuda: bool, compose: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compose()
    peak = predicted_metrics(run)["plan/peak_bytes"]
    assert peak is not None
    terminal = ProgressDisplay(run, 4, 0)
    terminal([{**row(3, OTHER_PHASES), **({"memory/peak_bytes": peak / 1.25} if is_cuda else {})}])
    terminal([row(4, OTHER_PHASES)])
    expected_line = f"peak {format_bytes(peak / 1.25)} (predicted +25.0%)  100 ms"
    assert [expected_line in line for line in capsys.readouterr().out.splitlines()] == [is_cuda] * 2


@pytest.mark.parametrize(
    ("metrics", "overrides"),
    [
        ({}, ""),
        ({"memory/peak_bytes": 2**20, "time/step_s": 0.2}, ""),
        ({"memory/peak_bytes": 2**20, "plan/peak_bytes": 2**20, "plan/step_s": None,
          "time/step_s": 0.2}, "peak 1.00 MiB (predicted +0.0%)"),
        ({"memory/peak_bytes": 2**20, "plan/peak_bytes": 2**19, "plan/step_s": 0.3,
          "time/step_s": 0.2}, "peak 1.00 MiB (predicted -50.0%)  step 200 ms (predicted +50.0%)"),
        ({"memory/peak_bytes": None, "plan/peak_bytes": 2**19}, ""),
    ],
)  # fmt: skip
def test_recorder_compares_measured_with_planned_values(
    metrics: dict[str, float | None], overrides: str
) -> None:
    assert tables.comparison_text(metrics) == overrides


def test_recorder_summary_has_medians(compose: Composed) -> None:
    """A run may start without a pipeline and resume with one."""
    rows = [row(1, OTHER_PHASES), row(2, PIPELINE), row(3, PIPELINE)]
    metrics = build_summary(compose(), rows, {})["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["time/forward_backward_s"] == pytest.approx(0.08)
    assert metrics["time/forward_s"] == pytest.approx(0.03)
    assert build_summary(compose(), rows[1:], {})["metrics"]["time/forward_s"] is None


@pytest.mark.parametrize(
    ("compiled", "device", "ranks", "callbacks", "is_measured"),
    [
        ("block", DeviceKind.cpu, 1, [], True),
        ("block", DeviceKind.cpu, 2, [], False),
        ("block", DeviceKind.cpu, 1, [Profiler()], False),
        ("none", DeviceKind.cpu, 2, [Profiler()], True),
        ("block", DeviceKind.cuda, 2, [Profiler()], True),
    ],
)
def test_recorder_counts_memory_of_compiled_steps(
    compiled: str,
    device: DeviceKind,
    ranks: int,
    callbacks: list[Profiler],
    is_measured: bool,
    compose: Composed,
) -> None:
    run = compose(f"compile={compiled}")
    run = replace(run, hardware=replace(run.hardware, device=device))
    trainer: Any = SimpleNamespace(world_size=ranks, callbacks=callbacks)
    assert MetricsRecorder(run, 0, [])._can_measure(trainer) == is_measured


def test_recorder_keeps_an_error_before_the_first_step(compose: Composed) -> None:
    """Lightning calls callbacks during error handling; an error in them would hide the first."""
    recorder = MetricsRecorder(compose(), 0, [])
    trainer = SimpleNamespace(world_size=1)
    recorder.on_exception(trainer, SimpleNamespace(), ValueError())


def test_recorder_separates_costs_by_strategy() -> None:
    metrics = {**row(3, OTHER_PHASES), "memory/peak_bytes": 8, "throughput/mfu": 0.5}
    shared_metrics = {"step": 3, "train/loss": 1.0, "train/grad_norm": 1.0, "train/lr": 1e-3}
    assert drop_cost_metrics(metrics) == shared_metrics


def test_mfu_counts_causal_attention_and_mfu_palm_all_pairs(compose: Composed) -> None:
    overrides = ("hardware=h100", "model=llama_160m", "data=synthetic", "precision=bf16_mixed")
    run = compose(*overrides, check_machine=False)
    model, sequence = run.model, run.data.sequence
    weights = sum(
        weight.numel
        for weight in model.weight_census()
        if weight.role in ("attention", "feedforward", "head")
    )
    per_token = {
        "throughput/mfu": 6 * weights + 6 * model.layers * sequence * model.query_width,
        "throughput/mfu_palm": 6 * weights + 12 * model.layers * sequence * model.query_width,
    }
    metrics = MetricsRecorder(run, 0, []).flops_metrics(run.tokens_per_step, seconds=2.0)
    for key, flops in per_token.items():
        expected = flops * run.tokens_per_step / 2.0 / run.hardware.peak_flops("bf16")
        assert metrics[key] == pytest.approx(expected), key
    plan = build_plan(run)
    assert plan.mfu is not None
    assert plan.mfu_palm is not None
    assert plan.mfu_palm / plan.mfu == pytest.approx(
        metrics["throughput/mfu_palm"] / metrics["throughput/mfu"]
    )


def test_progress_line_has_both_conventions_of_mfu(compose: Composed) -> None:
    run = compose("hardware=cpu")
    times = {**row(1, OTHER_PHASES), "throughput/mfu": 0.5, "throughput/tokens_per_s": 1.0}
    text = format_window([times], run, 10)
    assert f"MFU 50.0% (PaLM {0.5 * run.palm_to_causal_flops:.1%})" in text


def test_flops_of_a_step_are_those_of_its_sequence_length(compose: Composed) -> None:
    overrides = ("hardware=h100", "model=llama_160m", "data=synthetic", "precision=bf16_mixed")
    stage = "+trainer.sequence_warmup={a:{until_step:1,sequence:256}}"
    run = compose(*overrides, "data.sequence=2048", stage, check_machine=False)
    recorder, times = MetricsRecorder(run, 0, []), dict.fromkeys(PIPELINE, 0.1)
    rows = [row(step, PIPELINE) | recorder._throughput_metrics(step, times) for step in (1, 2)]
    flops = []
    for length, metrics in zip((256, 2048), rows, strict=True):
        constant = compose(*overrides, f"data.sequence={length}", check_machine=False)
        flops.append(constant.flops_per_step)
        expected = MetricsRecorder(constant, 0, [])._throughput_metrics(1, times)
        for key in ("throughput/mfu", "throughput/mfu_palm", "throughput/tokens_per_s"):
            assert metrics[key] == pytest.approx(expected[key]), (key, length)
    seconds = sum(metrics["time/step_s"] for metrics in rows)
    line = format_window(rows, run, 2)
    assert f"{sum(flops) / seconds / 1e12:.3g} TFLOP/s/device" in line
    assert f"MFU {sum(flops) / seconds / run.hardware.peak_flops('bf16'):.1%} " in line
