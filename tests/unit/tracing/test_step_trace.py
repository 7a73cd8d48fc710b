"""Suggested fixes by trace: which changes are traced, how often, and phases of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scalewise.planner.fit_check import FitStatus
from scalewise.planner.memory_breakdown import StepPhase
from scalewise.planner.suggested_fix import suggest_fix
from scalewise.run_config import RunConfig
from scalewise.tracing import step_trace
from scalewise.tracing.step_trace import MAX_TRACES, StepTrace, TraceFitCheck
from scalewise.units import GIB

Traced = list[RunConfig]
TRAINING = ("model=decoder_nano", "hardware=cpu", "hardware.memory_gib=1", "trainer.micro_batch=8")


def phase_bytes_of(persistent_bytes: int, temporary_bytes: int) -> StepTrace:
    """Memory by phase of a trace whose activations dominate."""
    phase_bytes = {"parameters": persistent_bytes, "optimizer": 0, "average": 0}
    phase_bytes |= {"workspaces": 0, "activations": temporary_bytes, "gradients": 7}
    moments = {
        "forward": persistent_bytes + temporary_bytes,
        "head": persistent_bytes + temporary_bytes,
        "optimizer": persistent_bytes + 9,
    }
    metrics = {f"memory/{name}_bytes": size for name, size in phase_bytes.items()}
    return StepTrace(persistent_bytes + temporary_bytes, moments, metrics, (6,))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Traced runs; a sample of a micro-batch takes 0.3 GiB, and constant memory is 0.1 GiB."""
    runs: Traced = []

    def answer(run: RunConfig, *, full_depth: bool) -> StepTrace:
        runs.append(run)
        return phase_bytes_of(int(0.1 * GIB), int(0.3 * GIB) * run.micro_batch)

    monkeypatch.setattr(step_trace, "trace_run", answer)
    return runs


def test_trace_phases_are_its_peak_points() -> None:
    breakdown = phase_bytes_of(100, 50).build_breakdown()
    assert {phase: size for phase, size in breakdown.phases.items() if size} == {
        StepPhase.forward: 150,
        StepPhase.backward_loss: 150,
        StepPhase.optimizer: 109,
    }
    optimizer_bytes = {
        entry.name: entry.bytes.get(StepPhase.optimizer, 0) for entry in breakdown.entries
    }
    assert optimizer_bytes["parameters"] == 100
    assert optimizer_bytes["gradients"] == 7
    assert optimizer_bytes["what else is alive"] == 2


def test_trace_peak_points_all_have_a_phase() -> None:
    blocks = {"block 0", "block 1", "blocks", "block -2", "block -1"}
    assert set(step_trace.PHASES) == {"forward", "head", "optimizer", *blocks}


def test_trace_fix_is_the_cheapest_that_fits(
    compose: Callable[..., RunConfig], traced: Traced
) -> None:
    fix = suggest_fix(compose(*TRAINING), TraceFitCheck())
    assert fix is not None
    assert fix.override_text.startswith("trainer.micro_batch=2")
    assert [run.micro_batch for run in traced] == [4, 2]


def test_slow_trace_runs_once(
    compose: Callable[..., RunConfig], traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fit_check = compose(*TRAINING), TraceFitCheck()
    monkeypatch.setattr(step_trace, "trace_run", lambda run, full_depth: phase_bytes_of(2 * GIB, 0))
    fit = fit_check(run)
    assert fit is not None
    assert fit.status is FitStatus.out_of_memory
    assert fit_check(replace(run, trainer=replace(run.trainer, micro_batch=1))) is None


def test_some_fixes_are_never_traced(compose: Callable[..., RunConfig], traced: Traced) -> None:
    assert (
        TraceFitCheck()(compose(*TRAINING, "parallelism=fsdp", "parallelism.cpu_offload=true"))
        is None
    )
    fit_check = TraceFitCheck()
    fit_statuses = [fit_check(compose(*TRAINING)) for _ in range(MAX_TRACES + 2)]
    assert fit_statuses[-2:] == [None, None]
    assert len(traced) == MAX_TRACES
