"""Ctrl-C and SIGTERM: a checkpoint, a status, an exit code, and nobody left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from signal import SIGHUP, SIGINT, SIGTERM

import pytest
from fixtures.cli_runner import TINY, UNTRACKED, CliResult, CliRunner, RunDir

LONG_RUN = (
    *UNTRACKED,
    "trainer.max_steps=100000",
    "trainer.log_every=1",
    "trainer.validate_every=null",
)
LONG = pytest.mark.exhaustive
EXIT = {SIGHUP: 129, SIGINT: 130, SIGTERM: 143}


def assert_interrupted(ended: CliResult, run: RunDir, number: int) -> None:
    assert ended.code == EXIT[signal.Signals(number)], ended.failure_report
    assert "Traceback" not in ended.transcript
    status = run.status
    assert (status["status"], status["exit_code"]) == ("interrupted", ended.code)
    step = run.checkpoints[-1]
    assert f"{signal.Signals(number).name} after step {step}" in status["reason"]
    assert run.steps == list(range(1, step + 1))
    assert (run.path / "report.html").is_file()


@pytest.mark.parametrize(
    ("layout", "number", "group"),
    [
        pytest.param("single", SIGINT, False, marks=LONG),
        pytest.param("single", SIGINT, True, marks=LONG),
        pytest.param("single", SIGTERM, False, marks=LONG),
        pytest.param("ddp", SIGINT, True, marks=LONG),
        ("ddp", SIGTERM, False),
        pytest.param("single", SIGHUP, True, marks=LONG),
        pytest.param("ddp", SIGHUP, True, marks=LONG),
    ],
)
def test_signal_saves_a_checkpoint_and_ends_the_run(
    layout: str, number: int, group: bool, run_cli: CliRunner
) -> None:
    door = run_cli.start(*LONG_RUN, f"parallelism={layout}")
    door.wait_for_step(3)
    door.signal(number, group=group)
    began = time.monotonic()
    ended = door.wait(30)
    assert time.monotonic() - began < 20
    assert_interrupted(ended, ended.folder, number)
    assert door.remaining_processes(within=2) == []
    further = ended.folder.checkpoints[-1] + 2
    resumed = run_cli(
        *LONG_RUN, f"parallelism={layout}", "resume=last", f"trainer.max_steps={further}"
    ).assert_ok()
    assert resumed.newest.steps == list(range(1, further + 1))


@LONG
@pytest.mark.parametrize("layout", ["single", pytest.param("ddp", marks=LONG)])
def test_sighup_is_ignored_under_nohup(layout: str, run_cli: CliRunner) -> None:
    line = [sys.executable, "-m", "scalewise", "train", *LONG_RUN, f"parallelism={layout}"]
    door = run_cli.start_process(["nohup", *line])
    door.wait_for_step(3)
    door.signal(SIGHUP, group=True)
    time.sleep(1)
    assert door.process.poll() is None
    door.signal(SIGTERM)
    assert door.wait(30).code == EXIT[SIGTERM]


@pytest.mark.parametrize(
    ("number", "group"), [(SIGINT, True), pytest.param(SIGTERM, False, marks=LONG)]
)
def test_signal_ends_a_sweep(number: int, group: bool, run_cli: CliRunner) -> None:
    door = run_cli.start("-m", *LONG_RUN, "seed=1,2,3")
    door.wait_for_step(3)
    door.signal(number, group=group)
    ended = door.wait(30)
    first, *rest = ended.folder.jobs
    assert_interrupted(ended, first, number)
    assert not any(job.path.exists() for job in rest)
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 3
    assert record["ended"] is not None
    assert door.remaining_processes(within=2) == []


@pytest.mark.parametrize("layout", [pytest.param("single", marks=LONG), "ddp"])
def test_signal_is_reported_to_the_tracker(layout: str, run_cli: CliRunner) -> None:
    tracked = [part for part in LONG_RUN if part != "tracking=none"]
    door = run_cli.start(*tracked, f"parallelism={layout}")
    door.wait_for_step(3)
    door.signal(SIGINT, group=True)
    ended = door.wait(30)
    assert_interrupted(ended, ended.folder, SIGINT)
    (file,) = ended.folder.path.glob("wandb/offline-run-*/run-*.wandb")
    line = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    said = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    records = [json.loads(line) for line in said.splitlines()]
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [130]
    assert any(record["type"] == "history" for record in records)
    assert door.remaining_processes(within=3) == []


@pytest.mark.parametrize("layout", [pytest.param("single", marks=LONG), "ddp"])
def test_second_ctrl_c_ends_at_once(layout: str, run_cli: CliRunner) -> None:
    """The first one is never acted on here: the step does not end."""
    door = run_cli.start(*LONG_RUN, f"parallelism={layout}", *_stuck_at(3))
    run = RunDir(door.wait_for_file("runs/*/*/stuck").parent)
    door.signal(SIGINT, group=True)
    time.sleep(0.7)
    assert door.process.poll() is None
    door.signal(SIGINT, group=True)
    ended = door.wait(15)
    assert ended.code == 130, ended.failure_report
    assert run.status["status"] == "interrupted"
    assert door.remaining_processes(within=2) == []


def _stuck_at(step: int) -> tuple[str, ...]:
    return (
        "trusted_packages=[fixtures]",
        "+callbacks.stuck._target_=fixtures.faults.HangInStep",
        f"+callbacks.stuck.step={step}",
    )


@LONG
@pytest.mark.parametrize("accident", ["none", "hang"])
def test_ranks_end_with_a_killed_launcher(accident: str, run_cli: CliRunner) -> None:
    hung = (f"+inject={accident}", *(["callbacks.inject.step=5"] if accident != "none" else []))
    door = run_cli.start(*LONG_RUN, "parallelism=ddp", "checkpoint.every=2", *hung)
    run = RunDir(door.wait_for_step(4))
    door.process.kill()
    door.process.wait(5)
    assert door.remaining_processes(within=15) == []
    door.wait()
    further = run.checkpoints[-1] + 2
    resumed = run_cli(
        *LONG_RUN, "parallelism=ddp", "resume=auto", f"trainer.max_steps={further}"
    ).assert_ok()
    assert resumed.newest.status["resumed_from"] is not None


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ("single", SIGTERM),
        ("ddp", SIGINT),
        pytest.param("single", SIGINT, marks=LONG),
        pytest.param("ddp", SIGTERM, marks=LONG),
    ],
)
def test_signal_before_training_ends_the_run(layout: str, number: int, run_cli: CliRunner) -> None:
    door = run_cli.start(*LONG_RUN, f"parallelism={layout}")
    door.wait_for_file("runs/*/*/status.json")
    door.signal(number, group=True)
    ended = door.wait(20)
    assert ended.code == EXIT[signal.Signals(number)], ended.failure_report
    assert "Traceback" not in ended.transcript
    assert ended.folder.status["status"] == "interrupted"
    assert door.remaining_processes(within=2) == []


@pytest.mark.parametrize(
    "delay", [0.3, 1.2, *(pytest.param(d, marks=LONG) for d in (0.1, 0.6, 2.0))]
)
def test_signal_while_starting_leaves_no_partial_run(delay: float, run_cli: CliRunner) -> None:
    door = run_cli.start(*TINY, "trainer.max_steps=100000")
    time.sleep(delay)
    door.signal(SIGTERM)
    ended = door.wait(20)
    assert ended.code in (143, -SIGTERM), ended.failure_report
    assert "Traceback" not in ended.transcript
    for run in ended.folders:
        assert run.status["status"] == "interrupted"
    assert door.remaining_processes(within=2) == []
