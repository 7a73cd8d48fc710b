"""``hydra/sweeper=optuna``: failed, pruned and rejected trials, and killed sweeps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.cli_runner import UNTRACKED, CliResult, CliRunner, RunDir

EXHAUSTIVE = pytest.mark.exhaustive
GRID = ("-m", *UNTRACKED, "hydra/sweeper=optuna", "hydra.sweeper.sampler=grid")


def study(folder: RunDir) -> dict[str, Any]:
    return folder.json("study.json")


def statuses(folder: RunDir) -> list[str]:
    return [trial["status"] for trial in study(folder)["trials"]]


class TestSearch:
    """Four trials: one succeeds, one runs out of memory, two cannot start."""

    @pytest.fixture(scope="class")
    @classmethod
    def ended(cls, cli_runner_in: Callable[[str], CliRunner]) -> CliResult:
        axes = ("+inject=none,oom", "data.sequence=32,65536")
        return cli_runner_in("search")(*GRID, "hydra.sweeper.jobs=3", *axes)

    def test_search_continues_after_failed_trials(self, ended: CliResult) -> None:
        assert ended.code == 1, ended.transcript  # its unsuccessful trials share none
        assert statuses(ended.folder) == ["ok", "out_of_memory", "refused", "refused"]
        states = [trial["state"] for trial in study(ended.folder)["trials"]]
        assert states == ["complete", "fail", "fail", "fail"]
        assert [job["status"] for job in ended.folder.json("sweep.json")["jobs"]] == [
            "ok",
            "out_of_memory",
        ]

    def test_search_prints_why_trials_failed(self, ended: CliResult) -> None:
        assert "trial 2 rejected" in ended.out
        assert "data.sequence=65536" in ended.out
        assert "Traceback" not in ended.transcript

    def test_search_prints_overrides_of_the_best_trial(self, ended: CliResult) -> None:
        assert study(ended.folder)["best"] == [0]
        (command_line,) = [
            text for text in ended.out.splitlines() if text.startswith("scalewise train")
        ]
        assert {"+inject=none", "data.sequence=32"} < set(command_line.split())

    def test_trial_value_equals_the_metric_of_its_job(self, ended: CliResult) -> None:
        (first, *_) = study(ended.folder)["trials"]
        val_loss = ended.folder.jobs[0].summary["metrics"]["val/loss"]
        assert first["values"] == [val_loss]
        assert first["folder"] == "0"

    def test_search_job_status_lists_varied_values(self, ended: CliResult) -> None:
        varied = ended.folder.jobs[0].status["varied"]
        assert varied == {"inject": "none", "data.sequence": "32"}


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=EXHAUSTIVE)])
def test_pruned_trial_trains_fewer_steps(strategy: str, run_cli: CliRunner) -> None:
    axes = ("optimizer.lr=1e-2,1e-7", "trainer.max_steps=12", f"parallelism={strategy}")
    result = run_cli(*GRID, "hydra.sweeper.pruner=asha", *axes).assert_ok()
    finished_job, pruned_job = result.folder.jobs
    assert (finished_job.steps[-1], pruned_job.steps[-1]) == (12, 4)
    assert pruned_job.summary["steps"] == 4
    assert pruned_job.status["status"] == "pruned"
    assert pruned_job.status["exit_code"] == 0
    assert pruned_job.status["reason"] == "the study pruned the trial after step 4, by val/loss"
    assert "pruned" in (result.folder.path / "report.html").read_text("utf-8")
    trials = study(result.folder)["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "pruned"]
    assert list(trials[1]["reported"]) == ["4"]


@pytest.mark.exhaustive
def test_killed_search_resumes(run_cli: CliRunner) -> None:
    """SIGKILL in the second of three trials: only the second is repeated."""
    overrides = (*GRID, "optimizer.lr=1e-3,2e-3,3e-3", "hydra.sweep.dir=runs/search/once")
    slow_steps = "trainer.max_steps=200"
    process = run_cli.start(
        *overrides, slow_steps, "trainer.log_every=1", "trainer.validate_every=100"
    )
    process.wait_for_file("runs/search/once/1/metrics.csv")
    process.kill()
    process.wait()
    folder = RunDir(run_cli.cwd / "runs" / "search" / "once")
    (first,) = [trial for trial in study(folder)["trials"] if trial["state"] == "complete"]
    result = run_cli(*overrides, "trainer.max_steps=4").assert_ok()
    trials = study(folder)["trials"]
    assert trials[0] == first
    assert sorted(t["params"]["optimizer.lr"] for t in trials if t["state"] == "complete") == [
        "0.001",
        "0.002",
        "0.003",
    ]
    assert [t["status"] for t in trials if t["state"] == "fail"] == ["running"]
    assert [job["number"] for job in folder.json("sweep.json")["jobs"]] == [0, 1, 2, 3]
    assert "trial 1 was running when its sweep ended" in result.out


@EXHAUSTIVE
def test_interrupted_search_resumes_from_its_storage(run_cli: CliRunner) -> None:
    overrides = (*GRID, "optimizer.lr=1e-3,2e-3,3e-3", "hydra.sweeper.storage=kept/search.db")
    process = run_cli.start(*overrides, "trainer.max_steps=400", "trainer.validate_every=200")
    process.wait_for_file("runs/*/*/0/metrics.csv")
    process.signal(15)
    assert process.wait().code == 143
    result = run_cli(*overrides, "trainer.max_steps=4").assert_ok()
    trials = study(result.newest)["trials"]
    assert [trial["state"] for trial in trials].count("complete") == 3
    assert (run_cli.cwd / "kept" / "search.db").is_file()


def test_search_plan_is_one_table(run_cli: CliRunner) -> None:
    axes = ("hydra.sweeper.trials=3", "optimizer.lr=tag(log,interval(1e-5,1e-2))")
    result = run_cli("-m", *UNTRACKED, "hydra/sweeper=optuna", *axes, command="plan").assert_ok()
    assert result.out.count("fits") >= 3
    assert not (run_cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ("hydra.sweeper.objectives={val/los: minimize}", "hydra.sweeper.sampler=tpee"),
            ("did you mean val/loss?", "did you mean tpe?"),
        ),
        (("trainer.validate_every=null",), ("no trial measures the objective val/loss",)),
        (("trainer.micro_batch=0",), ("trainer.micro_batch",)),
        pytest.param(("hydra.sweeper.trials=many",), ("trials",), marks=EXHAUSTIVE),
        pytest.param(("precision=fp33,fp32",), ("fp33",), marks=EXHAUSTIVE),
    ],
)
def test_search_rejects_invalid_spaces(
    overrides: tuple[str, ...], messages: tuple[str, ...], run_cli: CliRunner
) -> None:
    search_overrides = (
        "-m",
        *UNTRACKED,
        "hydra/sweeper=optuna",
        "optimizer.lr=interval(1e-5,1e-2)",
    )
    run_cli(*search_overrides, *overrides).assert_rejected(*messages)
    assert not list(Path(run_cli.cwd).glob("runs/*/*"))


def test_search_without_optuna_names_the_extra(run_cli: CliRunner) -> None:
    missing_package = run_cli.cwd / "absent"
    missing_package.mkdir()
    (missing_package / "optuna.py").write_text("raise ImportError('absent')\n", "utf-8")
    path = f"{missing_package}{os.pathsep}{run_cli.environment['PYTHONPATH']}"
    overrides = ("-m", *UNTRACKED, "hydra/sweeper=optuna", "optimizer.lr=1e-3,1e-2")
    run_cli(*overrides, env={"PYTHONPATH": path}).assert_rejected("pip install 'scalewise[optuna]'")


@EXHAUSTIVE
def test_search_of_several_objectives_respects_a_constraint(run_cli: CliRunner) -> None:
    """Wide models learn faster and run slower; the memory bound excludes the widest."""
    objectives = "hydra.sweeper.objectives={val/loss: minimize, throughput/tokens_per_s: maximize}"
    constraint = "hydra.sweeper.constraints={memory/peak_bytes: 2.5e6}"
    axes = ("model.width=16,32,64", "optimizer.lr=tag(log,interval(1e-3,1e-1))")
    options = ("hydra.sweeper.trials=8", "hydra.sweeper.jobs=4", "hydra.sweeper.sampler=nsga2")
    overrides = ("-m", *UNTRACKED, "hydra/sweeper=optuna", objectives, constraint, *options, *axes)
    result = run_cli(*overrides, timeout=300).assert_ok()
    trials = study(result.folder)["trials"]
    assert len(trials) == 8
    for trial in trials:
        metrics = result.folder.jobs[trial["number"]].summary["metrics"]
        assert trial["values"] == [metrics["val/loss"], metrics["throughput/tokens_per_s"]], trial
        assert bool(trial["over"]) == (metrics["memory/peak_bytes"] > 2.5e6), trial
    best = [trials[number] for number in study(result.folder)["best"]]
    assert best
    assert all(not trial["over"] for trial in best)
    losses = [trial["values"][0] for trial in best]
    speeds = [trial["values"][1] for trial in best]
    assert losses == sorted(losses)
    assert speeds == sorted(speeds)
    assert result.out.count("scalewise train") >= len(best)


@EXHAUSTIVE
def test_shipped_search_sweep_runs(run_cli: CliRunner) -> None:
    result = run_cli("sweep=search_learning_rate", *UNTRACKED, "hydra.sweeper.trials=3").assert_ok()
    assert len(study(result.folder)["trials"]) == 3
    json.dumps(study(result.folder)["importance"])
