"""Sweeps under Slurm with two nodes, without accounting: every outcome of a job."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.cli_runner import TINY, UNTRACKED, CliProcess, CliResult, CliRunner, RunDir
from fixtures.slurm_cluster import SlurmCluster, missing_requirements, slurm_cluster

from scalewise.run_files import read_json

pytestmark = pytest.mark.skipif(
    bool(missing_requirements()), reason=f"no Slurm here: {missing_requirements()}"
)

EXHAUSTIVE = pytest.mark.exhaustive
SLOW_STEPS = ("trusted_packages=[fixtures]", "+callbacks.slow._target_=fixtures.faults.SlowSteps")
"""Steps of 0.7 s."""
LOGGED_STEPS = ("trainer.log_every=1", "trainer.validate_every=null", *SLOW_STEPS)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Sweep:
    """Submitted sweep, and the operations of the tests on its jobs."""

    def __init__(self, process: CliProcess, slurm: SlurmCluster) -> None:
        self.command, self.slurm = process, slurm

    @property
    def folder(self) -> RunDir:
        (sweep_path,) = self.command.cwd.glob("runs/*/*")
        return RunDir(sweep_path)

    def job(self, index: int) -> RunDir:
        return RunDir(self.folder.path / str(index))

    def id(self, index: int) -> str:
        return str(self.folder.json("slurm/jobs.json")[str(index)])

    def submitted(self, jobs: int) -> range:
        """Wait until Slurm lists the jobs; return their numbers."""
        self.command.wait_for_file("runs/*/*/slurm/jobs.json")
        return range(jobs)

    @property
    def statuses(self) -> list[str]:
        return [job["status"] for job in self.folder.json("sweep.json")["jobs"]]

    def wait_until(self, condition: Callable[[], object], awaited: str) -> None:
        self.command.wait_until(condition, awaited, 90)

    def wait_for_step(self, index: int, step: int) -> None:
        file = self.command.cwd / "runs"

        def reached() -> bool:
            metric_files = list(file.glob(f"*/*/{index}/metrics.csv"))
            return bool(metric_files) and step in RunDir(metric_files[0].parent).steps

        self.wait_until(reached, f"step {step} of job {index}")

    def wait_until_restarted(self, index: int) -> None:
        def again() -> bool:
            time.sleep(0.5)
            if self.slurm.jobs().get(self.id(index)) == "PENDING":
                time.sleep(2)  # a node accepts no job in the second in which its last job ended
                self.slurm.start_now(self.id(index))
            return read_json(self.job(index).path / "status.json").get("attempts") == 2

        self.submitted(0)
        self.wait_until(again, f"second attempt at job {index}")

    def wait(self) -> CliResult:
        return self.command.wait(120)


@pytest.fixture
def submit(run_cli: CliRunner, slurm: SlurmCluster) -> Iterator[Callable[..., Sweep]]:
    def submitted(*overrides: str) -> Sweep:
        environment = {**slurm.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = run_cli.start("-m", "hydra/launcher=slurm", *overrides, env=environment)
        return Sweep(process, slurm)

    yield submitted
    if slurm.jobs():
        slurm.run_command("scancel", "--user=root")
        slurm.wait_until_empty()


def test_slurm_runs_jobs_on_one_and_two_nodes(submit: Callable[..., Sweep]) -> None:
    """Jobs with equal resources are one array, whose indices are the job numbers."""
    sweep = submit(*UNTRACKED, "parallelism=single,ddp,fsdp", "hydra.launcher.nodes=2")
    sweep.wait().assert_ok()
    assert sweep.statuses == ["ok"] * 3
    arrays, _, array_indices = zip(*(sweep.id(n).partition("_") for n in range(3)), strict=True)
    assert array_indices == ("0", "1", "2")
    assert arrays[1] == arrays[2] != arrays[0]
    scripts = "".join(
        file.read_text() for file in sweep.folder.path.glob("slurm/[0-9]*_submission.sh")
    )
    assert re.findall("--nodes=(.)", scripts) in (["1", "2"], ["2", "1"])
    single, ddp, fsdp = sweep.folder.jobs
    for job in (ddp, fsdp):
        assert job.status["world_size"] == 2, job
        assert job.column("train/loss") == pytest.approx(single.column("train/loss"), abs=1e-5), job


@pytest.mark.exhaustive
def test_slurm_array_records_killed_ranks(submit: Callable[..., Sweep]) -> None:
    """A job whose rank 0 is killed leaves no report, and Slurm has no accounting."""
    sweep = submit(
        *UNTRACKED, "parallelism=ddp", "+inject=kill", "callbacks.inject.rank=0,1", "seed=1"
    )
    result = sweep.wait()
    assert result.code == 1, result.failure_report
    assert sweep.statuses == ["failed", "failed"]
    first, second_status = (job.status for job in sweep.folder.jobs)
    assert "rank 0 was killed" in first["reason"]
    assert f"Slurm state of job {sweep.id(0)}: FAILED" in first["reason"]
    assert first["log_tail"]
    assert second_status["reason"] == "rank 1 was killed without an exit report"
    assert [first["rank"], second_status["rank"]] == [0, 1]
    assert "job 0 failed" in result.out


@pytest.mark.exhaustive
def test_slurm_requeue_timeout_warning_and_cancel(submit: Callable[..., Sweep]) -> None:
    """By an administrator, by the time limit of Slurm, and by the user."""
    sweep = submit(*UNTRACKED, *LOGGED_STEPS, "seed=1,2,3", "trainer.max_steps=12")
    requeued_id, warned_id, cancelled_id = (sweep.id(n) for n in sweep.submitted(3))
    for index in range(3):
        sweep.wait_for_step(index, 3)
    sweep.slurm.run_command("scontrol", "requeue", requeued_id)
    sweep.slurm.run_command("scancel", "--signal=USR2", warned_id)
    sweep.slurm.run_command("scancel", cancelled_id)
    for index in (0, 1):
        sweep.wait_until_restarted(index)
    result = sweep.wait()
    assert result.code == 143, result.failure_report
    assert sweep.statuses == ["ok", "ok", "interrupted"]
    for job in sweep.folder.jobs[:2]:
        assert job.status["attempts"] == 2, job
        assert "checkpoints/step-" in job.status["resumed_from"], job
        assert job.steps == list(range(1, 13)), job
    status = sweep.job(2).status
    assert re.fullmatch(r"SIGTERM after step \d+; its checkpoint is saved", status["reason"])
    assert sweep.job(2).checkpoints
    log_text = (sweep.folder.path / "slurm" / f"{warned_id}_0_log.out").read_text("utf-8")
    assert "interrupted: SIGUSR2 after step" in log_text
    assert "Slurm requeued the job" in log_text


@pytest.mark.parametrize("partition", ["grace", pytest.param("low", marks=EXHAUSTIVE)])
def test_slurm_preemption_requeues_jobs(partition: str, submit: Callable[..., Sweep]) -> None:
    """With time to save, and with an exit as on requeue."""
    sweep_overrides = [override for override in TINY if "max_steps" not in override]
    sweep = submit(
        *sweep_overrides, *LOGGED_STEPS, "parallelism=ddp", "trainer.max_steps=10",
        f"hydra.launcher.partition={partition}",
    )  # fmt: skip
    sweep.wait_for_step(0, 3)
    all_nodes = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    sweep.slurm.run_command("sbatch", "--partition=high", *all_nodes)
    sweep.wait_until_restarted(0)
    sweep.wait().assert_ok()
    job = sweep.job(0)
    assert (job.status["status"], job.status["attempts"]) == ("ok", 2)
    assert job.steps == list(range(1, 11))
    attempts = list(job.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(attempts) == 2
    attempt_states = [wandb_records(file) for file in attempts]
    assert {attempt_state["run"]["run_group"] for attempt_state in attempt_states} == {
        "/".join(sweep.folder.path.parts[-2:])
    }
    assert len({attempt_state["run"]["run_id"] for attempt_state in attempt_states}) == 2
    # Slurm's SIGTERM also ends the W&B process: the first attempt has history but no exit record.
    assert all("history" in attempt_state for attempt_state in attempt_states)
    assert [
        attempt_state["exit"].get("exit_code", 0)
        for attempt_state in attempt_states
        if "exit" in attempt_state
    ] == [0]


def wandb_records(file: Path) -> dict[str, Any]:
    """First record of each type that W&B wrote for a run."""
    overrides = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    output = subprocess.run(
        overrides, stdin=subprocess.DEVNULL, capture_output=True, check=True
    ).stdout
    records = map(json.loads, reversed(output.splitlines()))
    return {record["type"]: record[record["type"]] for record in records}


def test_ctrl_c_while_watching_slurm_ends_no_job(
    submit: Callable[..., Sweep], run_cli: CliRunner
) -> None:
    """Jobs continue and write their pages; ``status`` shows them."""
    sweep = submit(*UNTRACKED, *LOGGED_STEPS, "seed=1,2", "hydra.launcher.array_parallelism=1")
    sweep.wait_for_step(0, 2)
    command = sweep.command
    command.signal(signal.SIGINT, group=True)
    result = command.wait(30)
    assert result.code == 130, result.failure_report
    array = sweep.id(0).partition("_")[0]
    status = f"scalewise status {sweep.folder.path}"
    assert f"{status} shows them, scancel {array} cancels them" in result.err
    assert f"afterwards: scalewise report {sweep.folder.path}" in result.err
    assert sweep.slurm.jobs() == {sweep.id(0): "RUNNING", sweep.id(1): "PENDING"}

    def watch_output() -> str:
        environment = sweep.slurm.environment
        return run_cli(str(sweep.folder.path), command="status", env=environment).assert_ok().out

    assert "1 running, 1 queued" in watch_output()
    assert re.search(r"0 +1 +running +\d+/8 +\d\.\d{4} +\d+\.\d s", watch_output())
    sweep.slurm.run_command("scancel", array)
    sweep.slurm.wait_until_empty()
    assert "1 interrupted, 1 lost" in watch_output()
    assert "its checkpoint is saved" in watch_output()
    assert "interrupted" in (sweep.job(0).path / "report.html").read_text("utf-8")
    assert not (sweep.folder.path / "report.html").exists()
    run_cli(str(sweep.folder.path), command="report").assert_ok()
    assert (sweep.folder.path / "report.html").exists()


def test_slurm_unknown_partition_is_rejected(
    submit: Callable[..., Sweep], run_cli: CliRunner
) -> None:
    result = submit(*UNTRACKED, "hydra.launcher.partition=nowhere", "seed=1,2").wait()
    result.assert_rejected("hydra/launcher=slurm", "invalid partition specified: nowhere")
    assert not any(run_cli.cwd.glob("runs/*/*/sweep.json"))


@EXHAUSTIVE
def test_slurm_time_limit_requeues_once(submit: Callable[..., Sweep]) -> None:
    """With a time limit of one minute: warned, requeued once, then ended."""
    sweep = submit(
        *UNTRACKED, *LOGGED_STEPS, "trainer.max_steps=100000", "hydra.launcher.timeout_min=1",
        "hydra.launcher.signal_delay_s=30", "hydra.launcher.max_num_timeout=1",
    )  # fmt: skip
    sweep.wait_until_restarted(0)
    result = sweep.wait()
    assert result.code == 128 + signal.SIGUSR2, result.failure_report
    status = sweep.job(0).status
    assert (status["status"], status["attempts"]) == ("interrupted", 2)
    assert "hydra.launcher.max_num_timeout=1" in status["reason"]
