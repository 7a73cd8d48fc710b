"""The Python API, torchrun as the launcher, and user config folders."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM

import pytest
import yaml
from fixtures.cli_runner import UNTRACKED, CliRunner, RunDir, same_weights

EXHAUSTIVE = pytest.mark.exhaustive
SCRIPT = """
import dataclasses, json, sys
import scalewise

if __name__ == "__main__":
    run = scalewise.compose(sys.argv[1:])
    result = scalewise.train(run, "mine")
    loss = result.objective
    print(json.dumps([result.status, result.exit_code, str(result.folder), loss]), flush=True)
    again = scalewise.train(dataclasses.replace(run, seed=2))
    print(json.dumps([again.status, again.exit_code, str(again.folder), again.reason]))
"""


@EXHAUSTIVE
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_api_trains_twice_in_one_script(strategy: str, run_cli: CliRunner) -> None:
    (run_cli.cwd / "script.py").write_text(SCRIPT)
    overrides = [sys.executable, "script.py", *UNTRACKED, f"parallelism={strategy}"]
    process = run_cli.start_process(overrides)
    result = process.wait().assert_ok()
    first, second = (json.loads(line) for line in result.out.splitlines() if line[0] == "[")
    run = RunDir(run_cli.cwd / "mine")
    assert first == ["ok", 0, str(run.path), run.summary["metrics"]["val/loss"]]
    assert second[:2] == ["ok", 0]
    assert result.folder.path == Path(second[2])
    assert (run.path / "report.html").is_file()
    assert not same_weights(run.weights(), result.folder.weights())
    assert process.remaining_processes(max_wait=3) == []


def test_api_returns_failed_runs_as_results(run_cli: CliRunner) -> None:
    (run_cli.cwd / "script.py").write_text(SCRIPT)
    result = run_cli.start_process(
        [sys.executable, "script.py", *UNTRACKED, "+inject=raise"]
    ).wait()
    first, second = (json.loads(line) for line in result.out.splitlines() if line[0] == "[")
    assert first[:2] == second[:2] == ["failed", 1]
    assert first[3] == float("inf")
    assert "on purpose" in second[3]


def torchrun(*overrides: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = ["-m", "scalewise", "train", *UNTRACKED, "parallelism=ddp", *overrides]
    return [sys.executable, *launcher, *command]


def test_torchrun_trains_like_the_own_launcher(
    run_cli: CliRunner, cli_runner_in: Callable[[str], CliRunner]
) -> None:
    result = (
        run_cli.start_process(torchrun("checkpoint.every=4", "checkpoint.keep=0"))
        .wait()
        .assert_ok()
    )
    assert result.folder.steps == list(range(1, 9))
    assert result.out.count("report runs/") == 1
    actual = cli_runner_in("ours")(*UNTRACKED, "parallelism=ddp").assert_ok()
    assert same_weights(result.folder.weights(8), actual.folder.weights(8))
    resumed = (
        run_cli.start_process(torchrun(f"resume={result.folder.checkpoint(4)}")).wait().assert_ok()
    )
    assert resumed.newest.steps == list(range(1, 9))
    assert same_weights(resumed.newest.weights(8), actual.folder.weights(8))


def test_torchrun_reports_a_failed_rank(run_cli: CliRunner) -> None:
    process = run_cli.start_process(torchrun("+inject=raise", "callbacks.inject.rank=1"))
    result = process.wait()
    assert result.code != 0
    assert process.remaining_processes(max_wait=3) == []
    assert len(result.folders) == 1


def test_torchrun_with_wrong_world_size_is_rejected(run_cli: CliRunner) -> None:
    result = run_cli.start_process(
        torchrun("parallelism.replicas=4", "trainer.micro_batch=2")
    ).wait()
    assert result.code != 0
    assert "requires 4 ranks; 2 were started" in result.err
    assert result.folders == []


@EXHAUSTIVE
def test_torchrun_saves_a_checkpoint_on_sigterm(run_cli: CliRunner) -> None:
    long_run = ("trainer.max_steps=100000", "trainer.validate_every=null", "trainer.log_every=1")
    process = run_cli.start_process(torchrun(*long_run))
    process.wait_for_step(3)
    process.signal(SIGTERM)
    result = process.wait(45)
    assert result.folder.status["status"] == "interrupted"
    assert result.folder.checkpoints != []
    assert process.remaining_processes(max_wait=3) == []


@pytest.fixture
def user_config_folder(tmp_path: Path) -> Path:
    """User folder with an optimizer option and two experiments."""
    files = {
        "optimizer/brisk.yaml": """
            defaults:
              - /schema/optimizer/adamw@_here_
              - _self_
            beta1: 0.8
            """,
        "experiment/mine.yaml": """
            # @package _global_
            defaults:
              - /experiment/smoke
              - override /optimizer: brisk
            question: Is brisk better?
            trainer: {max_steps: 6}
            """,
        "experiment/deep/mine.yaml": """
            # @package _global_
            defaults:
              - /experiment/mine
            seed: 7
            """,
        "sweep/seeds.yaml": """
            # @package _global_
            hydra:
              mode: MULTIRUN
              sweeper:
                params:
                  seed: 4,5
            """,
    }
    for name, text in files.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return tmp_path / "own"


SMALL_OVERRIDES = tuple(
    override for override in UNTRACKED if not override.startswith(("experiment", "trainer.max"))
)


@pytest.mark.parametrize(
    ("experiment", "seed"), [pytest.param("mine", 1, marks=EXHAUSTIVE), ("deep/mine", 7)]
)
def test_user_config_folder_extends_the_config_tree(
    experiment: str, seed: int, user_config_folder: Path, run_cli: CliRunner
) -> None:
    result = run_cli(
        "-cd", str(user_config_folder), f"experiment={experiment}", *SMALL_OVERRIDES
    ).assert_ok()
    resolved = result.folder.resolved
    assert (resolved["optimizer"]["beta1"], resolved["seed"]) == (0.8, seed)
    assert resolved["question"] == "Is brisk better?"
    assert result.folder.steps == list(range(1, 7))
    assert result.folder.path.parent.name == "decoder_nano-single-fp32-brisk-lr3e-3"


@pytest.mark.exhaustive
def test_sweep_file_runs_without_the_multirun_flag(
    user_config_folder: Path, run_cli: CliRunner
) -> None:
    """``sweep=NAME`` needs no ``-m`` and combines with other overrides."""
    result = run_cli(
        "-cd", str(user_config_folder), "experiment=mine", "sweep=seeds", *SMALL_OVERRIDES
    ).assert_ok()
    assert result.folder.path.parent.name == "mine-seeds"
    seeds = [
        yaml.safe_load((job.path / "resolved.yaml").read_text())["seed"]
        for job in result.folder.jobs
    ]
    assert seeds == [4, 5]
    assert result.folder.json("sweep.json")["varying"] == {"seed": ["4", "5"]}


def test_shipped_sweep_runs(run_cli: CliRunner) -> None:
    result = run_cli(*UNTRACKED, "sweep=precision_by_layout").assert_ok()
    jobs = result.folder.jobs
    assert [job.status["status"] for job in jobs] == ["ok"] * 4
    single, ddp = (
        next(job for job in jobs if job.status["varied"] == {"precision": "fp32", "parallelism": p})
        for p in ("single", "ddp")
    )
    assert ddp.column("train/loss") == pytest.approx(single.column("train/loss"), rel=1e-4)
