"""``scalewise plan`` on the command line."""

from __future__ import annotations

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner
from fixtures.fake_cuda import UNAVAILABLE
from fixtures.strategies import LLAMA_8B

from scalewise.units import GIB


def test_plan_prints_a_fix_for_a_run_that_does_not_fit(run_cli: CliRunner) -> None:
    result = run_cli(*LLAMA_8B, "trainer.micro_batch=8", command="plan")
    assert result.code == 3, result.failure_report
    assert "Out of memory: " in result.out
    (line,) = [line for line in result.out.splitlines() if line.startswith("scalewise train")]
    fixed_plan = run_cli(*line.split()[2:], command="plan").assert_ok()
    assert "Fits: " in fixed_plan.out
    assert "tok/s" in fixed_plan.out
    assert not (run_cli.cwd / "runs").exists()


def test_plan_prints_a_grid_as_one_table(run_cli: CliRunner) -> None:
    axes = ("precision=fp32,bf16_mixed", "memory=none,checkpoint_full")
    base_overrides = [override for override in LLAMA_8B if not override.startswith("precision")]
    result = run_cli("-m", *base_overrides, *axes, "trainer.micro_batch=1", command="plan")
    assert result.code == 3  # of the first row
    head, *rows, _, summed = result.out.splitlines()
    assert head.split()[:3] == ["precision", "memory", "fit"]
    assert [row.split()[:2] for row in rows] == [
        [precision, memory]
        for precision in ("fp32", "bf16_mixed")
        for memory in ("none", "checkpoint_full")
    ]
    assert summed.startswith("4 jobs; 1 does not fit (skipped with launch.refuse_unfit=true); ")
    assert "in sequence; $" in summed
    assert not (run_cli.cwd / "runs").exists()


def test_plan_traces_the_module(run_cli: CliRunner) -> None:
    overrides = (*LLAMA_8B, "trainer.micro_batch=1", "plan.method=trace")
    result = run_cli(*overrides, command="plan").assert_ok()
    trace_line = "Traced rank 0 with 4 and 6 layers: "
    (line_of_trace,) = [line for line in result.out.splitlines() if line.startswith(trace_line)]
    operators = "CPU operators" if UNAVAILABLE else "CUDA operators"
    assert f"0.0% ({operators})" in line_of_trace
    result = run_cli(*UNTRACKED, "parallelism=ddp", "plan.method=trace", command="plan").assert_ok()
    assert "Analytic prediction only, no trace: ddp requires real memory" in result.out


def test_plan_search_prints_overrides_that_train(run_cli: CliRunner) -> None:
    overrides = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")
    result = run_cli(*overrides, "plan.search=memory", command="plan").assert_ok()
    assert "Alternatives that differ in one choice" in result.out
    (overrides,) = [line for line in result.out.splitlines() if line.startswith("scalewise train")]
    assert "Fits: " in run_cli(*overrides.split()[2:], command="plan").assert_ok().out
    assert not (run_cli.cwd / "runs").exists()


def test_plan_search_without_result_prints_the_nearest(run_cli: CliRunner) -> None:
    overrides = ("model=llama3_70b", "hardware=rtx4090", "data=synthetic", "plan.search=memory")
    result = run_cli(*overrides, command="plan")
    assert result.code == 3, result.failure_report
    assert "Nothing fits" in result.out
    assert "it needs" in result.out


def test_plan_table_shows_the_best_strategy_of_each_job(run_cli: CliRunner) -> None:
    models = "model=llama_160m,tinyllama_1b"
    overrides = ("-m", models, "hardware=h100", "data=synthetic", "plan.search=memory")
    head, *rows, blank, summary_line = (
        run_cli(*overrides, command="plan").assert_ok().out.splitlines()
    )
    assert "overrides" in head
    assert blank == ""
    assert summary_line.startswith("2 jobs")
    assert len(rows) == 2
    assert all("trainer.micro_batch=" in row for row in rows)


@pytest.mark.parametrize(
    "overrides", [(), pytest.param(("-m", "seed=1,2"), marks=pytest.mark.exhaustive)]
)
def test_train_applies_a_fix_that_makes_the_run_fit(
    overrides: tuple[str, ...], run_cli: CliRunner
) -> None:
    small_device = ("trainer.micro_batch=16", "hardware.memory_gib=0.0025", "plan.fit=auto")
    result = run_cli(*overrides, *UNTRACKED, *small_device).assert_ok()
    assert "plan.fit=auto: trainer.micro_batch=" in result.out
    (folder,) = result.folders
    for job in folder.jobs if overrides else [folder]:
        assert job.resolved["trainer"]["micro_batch"] < 16, job
        assert job.json("plan.json")["plan/peak_bytes"] < 0.0025 * GIB, job


def test_train_rejects_a_run_that_no_fix_makes_fit(run_cli: CliRunner) -> None:
    overrides = (*UNTRACKED, "hardware.memory_gib=0.0001", "plan.fit=auto")
    run_cli(*overrides).assert_rejected("plan.fit=auto", "of 104.86 KiB")
    run_cli("-m", "seed=1,2", *overrides).assert_rejected("plan.fit=auto", "job 0:", "job 1:")
    assert not (run_cli.cwd / "runs").exists()


def test_plan_table_states_that_nothing_fits(run_cli: CliRunner) -> None:
    overrides = ("-m", "experiment=smoke", "hardware.memory_gib=0.001,0.002")
    assert run_cli(*overrides, command="plan").code == 3


def test_plan_rejects_what_train_rejects(run_cli: CliRunner) -> None:
    run_cli("modle=x", command="plan").assert_rejected("did you mean model?")
    run_cli(*LLAMA_8B, "trainer.micro_batch=0", command="plan").assert_rejected(
        "trainer.micro_batch=0"
    )
    assert not (run_cli.cwd / "runs").exists()
