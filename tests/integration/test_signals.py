"""Ctrl-C and SIGTERM: a checkpoint, a status, an exit code and no remaining process."""

from __future__ import annotations

import json
import os
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
EXHAUSTIVE = pytest.mark.exhaustive
EXIT_CODES = {SIGHUP: 129, SIGINT: 130, SIGTERM: 143}


def assert_interrupted(result: CliResult, run: RunDir, signal_number: int) -> None:
    assert result.code == EXIT_CODES[signal.Signals(signal_number)], result.failure_report
    assert "Traceback" not in result.transcript
    status = run.status
    assert (status["status"], status["exit_code"]) == ("interrupted", result.code)
    step = run.checkpoints[-1]
    assert f"{signal.Signals(signal_number).name} after step {step}" in status["reason"]
    assert run.steps == list(range(1, step + 1))
    assert (run.path / "report.html").is_file()


@pytest.mark.parametrize(
    ("strategy", "signal_number", "group"),
    [
        pytest.param("single", SIGINT, False, marks=EXHAUSTIVE),
        pytest.param("single", SIGINT, True, marks=EXHAUSTIVE),
        pytest.param("single", SIGTERM, False, marks=EXHAUSTIVE),
        pytest.param("ddp", SIGINT, True, marks=EXHAUSTIVE),
        ("ddp", SIGTERM, False),
        pytest.param("single", SIGHUP, True, marks=EXHAUSTIVE),
        pytest.param("ddp", SIGHUP, True, marks=EXHAUSTIVE),
    ],
)
def test_signal_saves_a_checkpoint_and_ends_the_run(
    strategy: str, signal_number: int, group: bool, run_cli: CliRunner
) -> None:
    process = run_cli.start(*LONG_RUN, f"parallelism={strategy}")
    process.wait_for_step(3)
    process.signal(signal_number, group=group)
    start = time.monotonic()
    result = process.wait(30)
    assert time.monotonic() - start < 20
    assert_interrupted(result, result.folder, signal_number)
    assert process.remaining_processes(max_wait=2) == []
    next_step = result.folder.checkpoints[-1] + 2
    resumed = run_cli(
        *LONG_RUN, f"parallelism={strategy}", "resume=last", f"trainer.max_steps={next_step}"
    ).assert_ok()
    assert resumed.newest.steps == list(range(1, next_step + 1))


@EXHAUSTIVE
@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=EXHAUSTIVE)])
def test_sighup_is_ignored_under_nohup(strategy: str, run_cli: CliRunner) -> None:
    overrides = [sys.executable, "-m", "scalewise", "train", *LONG_RUN, f"parallelism={strategy}"]
    process = run_cli.start_process(["nohup", *overrides])
    process.wait_for_step(3)
    process.signal(SIGHUP, group=True)
    time.sleep(1)
    assert process.process.poll() is None
    process.signal(SIGTERM)
    assert process.wait(30).code == EXIT_CODES[SIGTERM]


@pytest.mark.parametrize(
    ("signal_number", "group"), [(SIGINT, True), pytest.param(SIGTERM, False, marks=EXHAUSTIVE)]
)
def test_signal_ends_a_sweep(signal_number: int, group: bool, run_cli: CliRunner) -> None:
    process = run_cli.start("-m", *LONG_RUN, "seed=1,2,3")
    process.wait_for_step(3)
    process.signal(signal_number, group=group)
    result = process.wait(30)
    first, *other_jobs = result.folder.jobs
    assert_interrupted(result, first, signal_number)
    assert not any(job.path.exists() for job in other_jobs)
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 3
    assert record["ended"] is not None
    assert process.remaining_processes(max_wait=2) == []


@pytest.mark.parametrize("strategy", [pytest.param("single", marks=EXHAUSTIVE), "ddp"])
def test_signal_is_reported_to_the_tracker(strategy: str, run_cli: CliRunner) -> None:
    tracked = [override for override in LONG_RUN if override != "tracking=none"]
    process = run_cli.start(*tracked, f"parallelism={strategy}")
    process.wait_for_step(3)
    process.signal(SIGINT, group=True)
    result = process.wait(30)
    assert_interrupted(result, result.folder, SIGINT)
    (file,) = result.folder.path.glob("wandb/offline-run-*/run-*.wandb")
    overrides = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    output = subprocess.run(
        overrides, stdin=subprocess.DEVNULL, capture_output=True, check=True
    ).stdout
    records = [json.loads(line) for line in output.splitlines()]
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [130]
    assert any(record["type"] == "history" for record in records)
    assert process.remaining_processes(max_wait=3) == []


@pytest.mark.parametrize("strategy", [pytest.param("single", marks=EXHAUSTIVE), "ddp"])
def test_second_ctrl_c_ends_at_once(strategy: str, run_cli: CliRunner) -> None:
    """The first signal has no effect here, because the step does not end."""
    process = run_cli.start(*LONG_RUN, f"parallelism={strategy}", *_stuck_at(3))
    run = RunDir(process.wait_for_file("runs/*/*/stuck").parent)
    process.signal(SIGINT, group=True)
    time.sleep(0.7)
    assert process.process.poll() is None
    process.signal(SIGINT, group=True)
    result = process.wait(15)
    assert result.code == 130, result.failure_report
    assert run.status["status"] == "interrupted"
    assert process.remaining_processes(max_wait=2) == []


def _stuck_at(step: int) -> tuple[str, ...]:
    return (
        "trusted_packages=[fixtures]",
        "+callbacks.stuck._target_=fixtures.faults.HangInStep",
        f"+callbacks.stuck.step={step}",
    )


@EXHAUSTIVE
@pytest.mark.parametrize("fault", ["none", "hang"])
def test_ranks_end_with_a_killed_launcher(fault: str, run_cli: CliRunner) -> None:
    fault_overrides = (
        f"+inject={fault}",
        *(["callbacks.inject.step=5"] if fault != "none" else []),
    )
    process = run_cli.start(*LONG_RUN, "parallelism=ddp", "checkpoint.every=2", *fault_overrides)
    run = RunDir(process.wait_for_step(4))
    process.process.kill()
    process.process.wait(5)
    assert process.remaining_processes(max_wait=15) == []
    process.wait()
    next_step = run.checkpoints[-1] + 2
    resumed = run_cli(
        *LONG_RUN, "parallelism=ddp", "resume=auto", f"trainer.max_steps={next_step}"
    ).assert_ok()
    assert resumed.newest.status["resumed_from"] is not None


@pytest.mark.parametrize(
    ("strategy", "signal_number"),
    [
        ("single", SIGTERM),
        ("ddp", SIGINT),
        pytest.param("single", SIGINT, marks=EXHAUSTIVE),
        pytest.param("ddp", SIGTERM, marks=EXHAUSTIVE),
    ],
)
def test_signal_before_training_ends_the_run(
    strategy: str, signal_number: int, run_cli: CliRunner
) -> None:
    process = run_cli.start(*LONG_RUN, f"parallelism={strategy}")
    process.wait_for_file("runs/*/*/status.json")
    process.signal(signal_number, group=True)
    result = process.wait(20)
    assert result.code == EXIT_CODES[signal.Signals(signal_number)], result.failure_report
    assert "Traceback" not in result.transcript
    assert result.folder.status["status"] == "interrupted"
    assert process.remaining_processes(max_wait=2) == []


@pytest.mark.parametrize(
    "delay", [0.3, 1.2, *(pytest.param(d, marks=EXHAUSTIVE) for d in (0.1, 0.6, 2.0))]
)
def test_signal_while_starting_leaves_no_partial_run(delay: float, run_cli: CliRunner) -> None:
    process = run_cli.start(*TINY, "trainer.max_steps=100000")
    time.sleep(delay)
    process.signal(SIGTERM)
    result = process.wait(20)
    assert result.code in (143, -SIGTERM), result.failure_report
    assert "Traceback" not in result.transcript
    for run in result.folders:
        assert run.status["status"] == "interrupted", run
    assert process.remaining_processes(max_wait=2) == []


SIGINT_AT_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "scalewise.redaction":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def test_ctrl_c_during_imports_prints_no_traceback(run_cli: CliRunner) -> None:
    (run_cli.cwd / "sitecustomize.py").write_text(SIGINT_AT_IMPORT, "utf-8")
    path = f"{run_cli.cwd}{os.pathsep}{run_cli.environment['PYTHONPATH']}"
    result = run_cli(command="doctor", env={"PYTHONPATH": path})
    assert result.code == -SIGINT, result.failure_report  # 130 in a shell
    assert result.err == ""
