"""``scalewise plan`` as a user types it."""

from __future__ import annotations

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner
from fixtures.strategies import LLAMA_8B

from scalewise.units import GIB


def test_plan_prints_a_fix_for_a_run_that_does_not_fit(run_cli: CliRunner) -> None:
    ended = run_cli(*LLAMA_8B, "trainer.micro_batch=8", command="plan")
    assert ended.code == 3, ended.failure_report
    assert "Out of memory: " in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("scalewise train")]
    again = run_cli(*line.split()[2:], command="plan").assert_ok()
    assert "Fits: " in again.out
    assert "tok/s" in again.out
    assert not (run_cli.cwd / "runs").exists()


def test_plan_prints_a_grid_as_one_table(run_cli: CliRunner) -> None:
    axes = ("precision=fp32,bf16_mixed", "memory=none,checkpoint_full")
    rest = [part for part in LLAMA_8B if not part.startswith("precision")]
    ended = run_cli("-m", *rest, *axes, "trainer.micro_batch=1", command="plan")
    assert ended.code == 3  # of the first row
    head, *rows, _, summed = ended.out.splitlines()
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
    line = (*LLAMA_8B, "trainer.micro_batch=1", "plan.method=trace")
    ended = run_cli(*line, command="plan").assert_ok()
    told = "Traced rank 0 with 4 and 6 layers: "
    (line_of_trace,) = [line for line in ended.out.splitlines() if line.startswith(told)]
    assert "0.0% (CPU operators)" in line_of_trace
    ended = run_cli(*UNTRACKED, "parallelism=ddp", "plan.method=trace", command="plan").assert_ok()
    assert "Analytic prediction only, no trace: ddp requires real memory" in ended.out


def test_plan_search_prints_overrides_that_train(run_cli: CliRunner) -> None:
    line = ("model=llama_160m", "hardware=h100", "data=synthetic", "trainer.global_batch=8")
    ended = run_cli(*line, "plan.search=memory", command="plan").assert_ok()
    assert "Alternatives that differ in one choice" in ended.out
    (line,) = [line for line in ended.out.splitlines() if line.startswith("scalewise train")]
    assert "Fits: " in run_cli(*line.split()[2:], command="plan").assert_ok().out
    assert not (run_cli.cwd / "runs").exists()


def test_plan_search_without_result_prints_the_nearest(run_cli: CliRunner) -> None:
    line = ("model=llama3_70b", "hardware=rtx4090", "data=synthetic", "plan.search=memory")
    ended = run_cli(*line, command="plan")
    assert ended.code == 3, ended.failure_report
    assert "Nothing fits" in ended.out
    assert "it needs" in ended.out


def test_plan_table_shows_the_best_strategy_of_each_job(run_cli: CliRunner) -> None:
    models = "model=llama_160m,tinyllama_1b"
    line = ("-m", models, "hardware=h100", "data=synthetic", "plan.search=memory")
    head, *rows, blank, told = run_cli(*line, command="plan").assert_ok().out.splitlines()
    assert "overrides" in head
    assert blank == ""
    assert told.startswith("2 jobs")
    assert len(rows) == 2
    assert all("trainer.micro_batch=" in row for row in rows)


@pytest.mark.parametrize(
    "line", [(), pytest.param(("-m", "seed=1,2"), marks=pytest.mark.exhaustive)]
)
def test_train_applies_a_fix_that_makes_the_run_fit(
    line: tuple[str, ...], run_cli: CliRunner
) -> None:
    small = ("trainer.micro_batch=16", "hardware.memory_gib=0.0025", "plan.fit=auto")
    ended = run_cli(*line, *UNTRACKED, *small).assert_ok()
    assert "plan.fit=auto: trainer.micro_batch=" in ended.out
    (folder,) = ended.folders
    for job in folder.jobs if line else [folder]:
        assert job.resolved["trainer"]["micro_batch"] < 16
        assert job.json("plan.json")["plan/peak_bytes"] < 0.0025 * GIB


def test_train_rejects_a_run_that_no_fix_makes_fit(run_cli: CliRunner) -> None:
    line = (*UNTRACKED, "hardware.memory_gib=0.0001", "plan.fit=auto")
    run_cli(*line).assert_rejected("plan.fit=auto", "of 104.86 KiB")
    run_cli("-m", "seed=1,2", *line).assert_rejected("plan.fit=auto", "job 0:", "job 1:")
    assert not (run_cli.cwd / "runs").exists()


def test_plan_table_states_that_nothing_fits(run_cli: CliRunner) -> None:
    line = ("-m", "experiment=smoke", "hardware.memory_gib=0.001,0.002")
    assert run_cli(*line, command="plan").code == 3


def test_plan_rejects_what_train_rejects(run_cli: CliRunner) -> None:
    run_cli("modle=x", command="plan").assert_rejected("did you mean model?")
    run_cli(*LLAMA_8B, "trainer.micro_batch=0", command="plan").assert_rejected(
        "trainer.micro_batch=0"
    )
    assert not (run_cli.cwd / "runs").exists()
