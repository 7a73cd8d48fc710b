"""Concurrent jobs of a sweep: separate slots, independent failures."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner, RunDir

PACKED_SWEEP = ("-m", *UNTRACKED, "hydra/launcher=packed", "trusted_packages=[fixtures]")
SLOW_STEPS = "+callbacks.slow._target_=fixtures.faults.SlowSteps"
RECORD_AFFINITY = "+callbacks.seat._target_=fixtures.faults.RecordCpuAffinity"
LONG_RUN = ("trainer.max_steps=1000", "trainer.log_every=1", "trainer.validate_every=null")
CORES = len(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(CORES < 2, reason="one core has no shares")


def run_interval(job: RunDir) -> tuple[datetime, datetime]:
    status = job.status
    return datetime.fromisoformat(status["started"]), datetime.fromisoformat(status["ended"])


def max_concurrent(jobs: list[RunDir]) -> int:
    spans = [run_interval(job) for job in jobs]
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


def recorded_cores(job: RunDir, rank: int = 0) -> set[int]:
    affinity_record = job.json(f"seat-{rank}.json")
    assert affinity_record["threads"] <= len(affinity_record["cores"])
    return set(affinity_record["cores"])


@several_cores
def test_packed_jobs_run_concurrently_on_separate_cores(run_cli: CliRunner) -> None:
    overrides = (
        *PACKED_SWEEP,
        "hydra.launcher.slots=2",
        SLOW_STEPS,
        RECORD_AFFINITY,
        "trainer.max_steps=4",
    )
    process = run_cli.start(*overrides, "seed=1,2,3,4")
    result = process.wait().assert_ok()
    jobs = result.folder.jobs
    assert [job.status["status"] for job in jobs] == ["ok"] * 4
    assert max_concurrent(jobs) == 2
    job_cores = [recorded_cores(job) for job in jobs]
    assert job_cores[0] & job_cores[1] == set()
    assert job_cores[0] | job_cores[1] == os.sched_getaffinity(0)
    assert all(cores_of_job in job_cores[:2] for cores_of_job in job_cores)
    assert len({job.status["process"] for job in jobs}) == 2, "supervisors serve again"
    assert jobs[0].status["machine"]["cores"] == len(job_cores[0])
    progress_lines = [line for line in result.out.splitlines() if " | " in line]
    assert {line.split(" | ")[0].strip() for line in progress_lines} == {"0", "1", "2", "3"}
    assert sum("4/4" in line for line in progress_lines) == 4
    assert process.remaining_processes(max_wait=2) == []
    assert (result.folder.path / "report.html").is_file()


@several_cores
@pytest.mark.exhaustive
def test_sweep_file_chooses_the_packed_launcher(run_cli: CliRunner) -> None:
    file = run_cli.cwd / "own" / "sweeps" / "packed.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "defaults: [override /hydra/launcher: packed]\n"
        "hydra: {mode: MULTIRUN, launcher: {slots: 2}, sweeper: {params: {seed: '1,2'}}}\n"
    )
    overrides = (
        "-cd",
        "own",
        "sweep=packed",
        *UNTRACKED,
        "trusted_packages=[fixtures]",
        RECORD_AFFINITY,
    )
    jobs = run_cli(*overrides).assert_ok().folder.jobs
    assert recorded_cores(jobs[0]) & recorded_cores(jobs[1]) == set()


@several_cores
@pytest.mark.exhaustive
def test_killed_packed_job_frees_its_slot(run_cli: CliRunner) -> None:
    """Job 0 loses its supervisor, jobs 1 and 3 a rank; one strategy takes both slots."""
    kill_launcher = "{_target_:fixtures.faults.KillLauncher,job:0,step:5}"
    overrides = (
        *PACKED_SWEEP,
        "hydra.launcher.slots=2",
        f"+callbacks.fault={kill_launcher}",
        RECORD_AFFINITY,
    )
    process = run_cli.start(*overrides, "parallelism=single,ddp", "+inject=none,kill")
    result = process.wait()
    assert result.code == 1, result.failure_report
    assert "Traceback" not in result.transcript
    jobs = result.folder.jobs
    outcomes = [(job.status["status"], job.status["reason"]) for job in jobs]
    assert outcomes[0] == ("failed", "the supervisor process died: SIGKILL")
    assert outcomes[1] == outcomes[3] == ("failed", "rank 0 was killed by SIGKILL")
    assert outcomes[2][0] == "ok"
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["failed", "failed", "ok", "failed"]
    assert recorded_cores(jobs[2]) == os.sched_getaffinity(0)
    assert not (jobs[0].path / ".ranks").exists()
    assert process.remaining_processes(max_wait=2) == []


@pytest.mark.parametrize(
    ("signal_number", "group"),
    [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.exhaustive)],
)
def test_signal_ends_packed_jobs_and_saves_each(
    signal_number: int, group: bool, run_cli: CliRunner
) -> None:
    overrides = (*PACKED_SWEEP, *LONG_RUN, "hydra.launcher.slots=2")
    process = run_cli.start(*overrides, "seed=1,2,3")

    def both_train() -> bool:
        files = [process.cwd.glob(f"runs/*/*/{job}/metrics.csv") for job in (0, 1)]
        return all(any(len(f.read_text().splitlines()) > 3 for f in file) for file in files)

    process.wait_until(both_train, "two jobs that train")
    process.signal(signal_number, group=group)
    result = process.wait(30)
    assert result.code == 128 + signal_number, result.failure_report
    assert "Traceback" not in result.transcript
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 3
    for job in result.folder.jobs[:2]:
        step = job.checkpoints[-1]
        name = signal.Signals(signal_number).name
        assert f"{name} after step {step}" in job.status["reason"], job
    assert not result.folder.jobs[2].path.exists()
    assert process.remaining_processes(max_wait=2) == []


def test_signal_before_training_ends_a_packed_sweep(run_cli: CliRunner) -> None:
    process = run_cli.start(*PACKED_SWEEP, *LONG_RUN, "hydra.launcher.slots=2", "seed=1,2,3")
    process.wait_for_file("runs/*/*/sweep.json")
    process.signal(signal.SIGINT, group=True)
    result = process.wait(30)
    assert result.code == 130, result.failure_report
    assert "Traceback" not in result.transcript
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["interrupted"] * 3
    assert process.remaining_processes(max_wait=2) == []


@pytest.mark.exhaustive
def test_packed_jobs_save_when_the_sweep_is_killed(run_cli: CliRunner) -> None:
    overrides = (
        *PACKED_SWEEP,
        "hydra.launcher.slots=2",
        SLOW_STEPS,
        "trainer.max_steps=6",
        "seed=1,2",
    )
    process = run_cli.start(*overrides)
    folder = process.wait_for_step(2).parent
    process.process.kill()
    process.process.wait(5)
    assert process.remaining_processes(max_wait=20) == []
    stepped = [RunDir(file.parent) for file in folder.glob("*/metrics.csv")]
    assert {job.status["status"] for job in stepped if job.metrics} == {"interrupted"}
    result = run_cli(*overrides, "resume_sweep=last").assert_ok()
    assert [job.status["status"] for job in result.folder.jobs] == ["ok", "ok"]
    assert any(job.status["resumed_from"] for job in result.folder.jobs)
    assert all(job.steps == list(range(1, 7)) for job in result.folder.jobs)
    assert Path(result.folder.path) == folder
