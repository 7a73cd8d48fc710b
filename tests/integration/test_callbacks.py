"""Callback options in real runs."""

from __future__ import annotations

import json
import re

import pytest
from fixtures.cli_runner import same_weights
from fixtures.job_runner import JobRunner

from scalewise.checkpoints import store
from scalewise.commands import evaluate


def test_early_stopping_ends_the_run_with_status_ok(run_job: JobRunner) -> None:
    early_stopping = ("callbacks=[early_stopping]", "callbacks.early_stopping.patience=1")
    run = run_job(
        *early_stopping, "callbacks.early_stopping.min_delta=100", "trainer.validate_every=2"
    )
    assert run.status["status"] == "ok"
    assert run.steps == [1, 2, 3, 4]
    assert run.checkpoints[-1] == 4
    assert run.summary["steps"] == 4


def test_ema_is_validated_and_saved_next_to_the_weights(run_job: JobRunner) -> None:
    default_run, averaged = run_job(), run_job("callbacks=[ema]", "callbacks.ema.decay=0.5")
    assert averaged.column("train/loss") == default_run.column("train/loss")
    assert averaged.column("val/loss") != default_run.column("val/loss")
    assert same_weights(averaged.weights(), default_run.weights())
    average = store.full_tensors(averaged.checkpoint(averaged.checkpoints[-1]), store.AVERAGE)
    assert not same_weights(average, averaged.weights())


def test_evaluate_uses_the_ema_weights_of_validation(
    run_job: JobRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_job("callbacks=[ema]", "callbacks.ema.decay=0.5")
    assert evaluate.main([str(run.path)]) == 0
    assert ", averaged weights: " in capsys.readouterr().out
    (evaluation,) = run.json("evaluation.json").values()
    assert evaluation["loss"] == pytest.approx(run.column("val/loss")[-1], rel=1e-5)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2)])
def test_profiler_writes_one_trace_per_rank(
    strategy: str, ranks: int, run_job: JobRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_job("callbacks=[profiler]", f"parallelism={strategy}", "callbacks.profiler.wait=2")
    traces = sorted(run.path.glob("trace-rank*.json"))
    assert [trace.name for trace in traces] == [f"trace-rank{rank}.json" for rank in range(ranks)]
    events = json.loads(traces[0].read_text())["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)
    assert "profiler_start" not in capfd.readouterr().err


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_loss_guard_stops_a_diverged_run(strategy: str, run_job: JobRunner) -> None:
    diverging_overrides = ("optimizer=sgd", "optimizer.lr=1e6", "trainer.clip_norm=null")
    run = run_job(
        *diverging_overrides, f"parallelism={strategy}", "trainer.max_steps=40", status="failed"
    )
    status = run.status
    assert "the loss is nan at step" in status["reason"] or "a spike" in status["reason"]
    assert "lower optimizer.lr" in status["reason"]
    assert "optimizer.lr=3e+05" in [fix["override"] for fix in status["cures"]]
    assert all(int(step) <= 10 for step in run.checkpoints)


def test_loss_guard_reports_the_logged_loss(run_job: JobRunner) -> None:
    """Lightning divides its own value by the accumulation."""
    diverging_overrides = (
        "optimizer=sgd",
        "optimizer.lr=300",
        "trainer.clip_norm=null",
        "trainer.micro_batch=2",
    )
    guard_overrides = ("callbacks.guard.patience=1", "callbacks.guard.factor=1.2")
    run = run_job(*diverging_overrides, *guard_overrides, "trainer.max_steps=40", status="failed")
    spike = re.search(r"the loss is (\S+) at step (\d+)", run.status["reason"])
    assert spike, run.status["reason"]
    logged = dict(zip(run.steps, run.column("train/loss"), strict=True))[int(spike[2])]
    assert 0.5 < float(spike[1]) / logged < 2
