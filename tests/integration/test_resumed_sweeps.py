"""Interrupted and edited sweeps resume and keep finished jobs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner, RunDir

EXHAUSTIVE = pytest.mark.exhaustive
SWEEP = ("-m", *UNTRACKED, "checkpoint.every=2", "trusted_packages=[fixtures]")
KILL_IN_JOB_1 = (
    "+callbacks.fault._target_=fixtures.faults.KillLauncher",
    "+callbacks.fault.job=1",
    "+callbacks.fault.step=5",
)
SLOW_STEPS = "+callbacks.slow._target_=fixtures.faults.SlowSteps"


def finished_files(sweep: RunDir) -> dict[str, bytes]:
    """Content of the files of each successful job, by path."""
    content_by_file = {}
    for file in sweep.path.glob("*/status.json"):
        if json.loads(file.read_text("utf-8"))["status"] == "ok":
            content_by_file |= {
                str(job_file.relative_to(sweep.path)): job_file.read_bytes()
                for job_file in file.parent.rglob("*")
                if job_file.is_file() and job_file.name != "report.html"
            }
    return content_by_file


def unchanged(before: dict[str, bytes], sweep: RunDir) -> bool:
    return all((sweep.path / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=EXHAUSTIVE)])
def test_killed_sweep_resumes(strategy: str, run_cli: CliRunner) -> None:
    overrides = (*SWEEP, "seed=1,2,3", f"parallelism={strategy}", *KILL_IN_JOB_1)
    process = run_cli.start(*overrides)
    killed_result = process.wait()
    assert killed_result.code == -signal.SIGKILL, killed_result.failure_report
    assert process.remaining_processes(max_wait=15) == []
    sweep, before = killed_result.folder, finished_files(killed_result.folder)
    assert [job["status"] for job in sweep.json("sweep.json")["jobs"]] == [
        "ok",
        "running",
        "waiting",
    ]
    assert {name.split("/")[0] for name in before} == {"0"}

    plan_lines = (
        run_cli(*overrides, "resume_sweep=last", command="plan").assert_ok().out.splitlines()
    )
    assert plan_lines[0].endswith("1 of 3 jobs have ended, 2 to run")
    assert [row.split()[0] for row in plan_lines[1:4]] == ["seed", "2", "3"]
    assert unchanged(before, sweep)

    result = run_cli(*overrides, "resume_sweep=last").assert_ok()
    assert f"Resuming {sweep.path.relative_to(result.cwd)}: 1 of 3 jobs have ended" in result.out
    assert result.folder.path == sweep.path
    assert unchanged(before, sweep)
    record = sweep.json("sweep.json")
    assert [job["folder"] for job in record["jobs"]] == ["0", "1-2", "2"]
    assert [job["status"] for job in record["jobs"]] == ["ok"] * 3
    assert "resume_sweep" not in record["command"]
    second_job = sweep.jobs[1]
    assert str(sweep.path / "1" / "checkpoints") in second_job.status["resumed_from"]
    assert second_job.steps == list(range(1, 9))


KILL_BEFORE_WRITE = """
import os, signal, sys
from scalewise import cli
from scalewise.launch import sweep_runner

writes, last, write = 0, int(sys.argv[1]), sweep_runner.write_json

def counted(path, content):
    global writes
    writes += 1
    if writes == last:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)

sweep_runner.write_json = counted
cli.main(["train", *sys.argv[2:]])
"""


@pytest.mark.parametrize(
    ("write", "finished_statuses"),
    [
        pytest.param(2, [], marks=EXHAUSTIVE, id="before the first job"),
        pytest.param(3, ["0"], marks=EXHAUSTIVE, id="between a job's end and the record"),
        pytest.param(4, ["0"], marks=EXHAUSTIVE, id="between two jobs"),
        pytest.param(5, ["0", "1"], marks=EXHAUSTIVE, id="after the last job"),
        pytest.param(6, ["0", "1"], marks=EXHAUSTIVE, id="before the record is closed"),
    ],
)
def test_resumed_sweep_keeps_finished_jobs(
    write: int, finished_statuses: list[str], run_cli: CliRunner
) -> None:
    overrides = (*SWEEP, "seed=1,2")
    program = [sys.executable, "-c", KILL_BEFORE_WRITE, str(write), *overrides]
    killed_result = run_cli.start_process(program).wait()
    assert killed_result.code == -signal.SIGKILL, killed_result.failure_report
    before = finished_files(killed_result.folder)
    assert sorted({name.split("/")[0] for name in before}) == finished_statuses
    result = run_cli(*SWEEP, "seed=2", "resume_sweep=last").assert_ok()  # another grid than before
    assert unchanged(before, result.folder)
    assert [job.path.name for job in result.folder.jobs] == ["0", "1"]
    statuses = [job["status"] for job in result.folder.json("sweep.json")["jobs"]]
    assert statuses == ["ok" if finished_statuses else "interrupted", "ok"]
    assert result.folder.json("sweep.json")["ended"] is not None


def test_resumed_sweep_adds_jobs_and_retries_on_request(run_cli: CliRunner) -> None:
    """The timeout is not part of a job's identity: a timed-out job may resume with a larger one."""
    slow_sweep = (*SWEEP, SLOW_STEPS)
    result = run_cli(*slow_sweep, "seed=1,2", "launch.timeout=4")
    assert result.code == 4, result.failure_report
    sweep = result.folder
    assert [job.status["status"] for job in sweep.jobs] == ["timeout"] * 2

    resumed_result = run_cli(*slow_sweep, "seed=1,2", "resume_sweep=last", "launch.timeout=60")
    assert resumed_result.code == 4, resumed_result.failure_report
    assert "2 of 2 jobs have ended, 0 to run" in resumed_result.out

    changed_axes = ("seed=2,3", "resume_sweep=last", "launch.timeout=60")
    more = run_cli(*slow_sweep, *changed_axes, "retry=timeout,failed").assert_ok()
    record = more.folder.json("sweep.json")
    assert more.folder.path == sweep.path
    assert [(job["number"], job["folder"], job["status"]) for job in record["jobs"]] == [
        (0, "0", "timeout"),
        (1, "1-2", "ok"),
        (2, "2", "ok"),
    ]
    assert record["varying"] == {"seed": ["1", "2", "3"]}
    retried_job = more.folder.jobs[1]
    assert retried_job.status["resumed_from"] is not None
    assert retried_job.steps == list(range(1, 9))


@pytest.fixture
def running_sweep(run_cli: CliRunner) -> Iterator[tuple[CliRunner, Path]]:
    """Sweep that is running."""
    process = run_cli.start(*SWEEP, SLOW_STEPS, "trainer.max_steps=1000", "seed=1,2")
    folder = process.wait_for_step(2).parent
    yield run_cli, folder
    assert process.process.poll() is None
    process.signal(signal.SIGINT, group=True)
    assert process.wait(30).code == 130


def test_running_sweep_is_not_resumed(running_sweep: tuple[CliRunner, Path]) -> None:
    scalewise, folder = running_sweep
    record = (folder / "sweep.json").read_text("utf-8")
    pid = json.loads(record)["process"]["pid"]
    overrides = (*SWEEP, "seed=1,2")
    for resume_value in ("last", str(folder)):
        rejected_result = scalewise(*overrides, f"resume_sweep={resume_value}").assert_rejected(
            f"process {pid}"
        )
        assert "still running" in rejected_result.err, resume_value
    assert (folder / "sweep.json").read_text("utf-8") == record
