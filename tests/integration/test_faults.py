"""Failing jobs: the sweep continues, each status has a reason, no process remains."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

import pytest
from fixtures import faults
from fixtures.cli_runner import (
    TINY,
    UNTRACKED,
    CliProcess,
    CliResult,
    CliRunner,
    RunDir,
    same_weights,
)
from fixtures.job_runner import JobRunner

from scalewise.checkpoints import manifest
from scalewise.errors import ConfigError

FAULTS = {
    "none": ("ok", 0, ""),
    "raise": ("failed", 1, "RuntimeError: injected: this job raises on purpose"),
    "oom": ("out_of_memory", 3, ""),
    "hang": ("timeout", 4, "ran longer than launch.timeout=10 s"),
    "kill": ("failed", 1, "was killed by SIGKILL"),
}
EXHAUSTIVE = pytest.mark.exhaustive
LIMIT = "launch.timeout=10"


@pytest.fixture(scope="module")
def sweep(cli_runner_in: Callable[[str], CliRunner]) -> tuple[CliResult, CliProcess]:
    """Five jobs, four faults, W&B offline."""
    runner = cli_runner_in("faults")
    command = runner.start("-m", *TINY, "trainer.max_steps=5", LIMIT, f"+inject={','.join(FAULTS)}")
    return command.wait(), command


def test_sweep_records_the_status_of_every_job(sweep: tuple[CliResult, CliProcess]) -> None:
    result, _ = sweep
    for job, (status, code, reason) in zip(result.folder.jobs, FAULTS.values(), strict=True):
        job_status = job.status
        assert (job_status["status"], job_status["exit_code"]) == (status, code), job_status[
            "reason"
        ]
        assert reason in job_status["reason"], job
        assert not (job.path / ".ranks").exists(), job
        assert (job.path / "report.html").is_file(), job


def test_sweep_json_lists_job_statuses(sweep: tuple[CliResult, CliProcess]) -> None:
    result, _ = sweep
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == [s for s, _, _ in FAULTS.values()]
    assert record["varying"] == {"inject": list(FAULTS)}
    assert record["ended"] is not None
    assert result.folder.path.joinpath("report.html").is_file()


def test_sweep_command_fails_without_a_traceback(
    sweep: tuple[CliResult, CliProcess],
) -> None:
    result, _ = sweep
    assert result.code == 1
    assert "Traceback" not in result.transcript
    assert "job 2 out_of_memory" in result.out


def test_sweep_leaves_no_process(sweep: tuple[CliResult, CliProcess]) -> None:
    _, command = sweep
    assert command.remaining_processes(max_wait=2) == []


def test_failed_rank_keeps_its_log_tail(sweep: tuple[CliResult, CliProcess]) -> None:
    result, _ = sweep
    assert any("fault_injection.py" in line for line in result.folder.jobs[1].status["log_tail"])


EXPECTED_OUTCOMES = {
    "raise": ("failed", "RuntimeError: injected"),
    "kill": ("failed", "rank 1 was killed by SIGKILL"),
    "hang": ("timeout", "rank 1 blocked while the other ranks waited"),
    "oom": ("out_of_memory", ""),
}
STRATEGIES = {
    "ddp": ("parallelism=ddp",),
    "fsdp": ("parallelism=fsdp",),
    "pipeline": ("parallelism=pipeline", "model.layers=2"),
}
CI_CASES = {("ddp", "oom"), ("pipeline", "kill")}


def fault_timeout(uninterrupted: RunDir) -> int:
    """Timeout in seconds within which a job reaches its fault on a busy machine."""
    return max(8, 2 * ceil(uninterrupted.status["seconds"]))


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param(strategy, fault, marks=() if runs_in_ci else EXHAUSTIVE)
        for strategy in STRATEGIES
        for fault in EXPECTED_OUTCOMES
        for runs_in_ci in [(strategy, fault) in CI_CASES]
    ],
)
def test_fault_of_one_rank_ends_the_others(strategy: str, fault: str, run_job: JobRunner) -> None:
    limit = fault_timeout(run_job(*STRATEGIES[strategy]))
    start = time.monotonic()
    fault_overrides = [*STRATEGIES[strategy], f"+inject={fault}", "callbacks.inject.rank=1"]
    detection_s = limit if fault == "hang" else 0  # only the timeout detects it
    if detection_s:
        fault_overrides.append(f"launch.timeout={detection_s}")
    status, reason = EXPECTED_OUTCOMES[fault]
    job_status = run_job(*fault_overrides, status=status).status
    assert time.monotonic() - start < detection_s + 15
    assert reason in job_status["reason"]
    assert job_status["rank"] == 1
    if fault == "hang":
        assert any("rank 1: " in line and "in inject" in line for line in job_status["log_tail"])


def test_rank_that_ignores_signals_ends_soon_after_another_failed(run_job: JobRunner) -> None:
    frozen = "{_target_:fixtures.faults.FreezeRank,rank:0,step:3}"
    overrides = ("trusted_packages=[fixtures]", f"+callbacks.frozen={frozen}")
    oom = ("+inject=oom", "callbacks.inject.rank=1", "callbacks.inject.step=3")
    folder = run_job(*STRATEGIES["ddp"], *overrides, *oom, status="out_of_memory")
    assert folder.status["rank"] == 1
    seconds_after_failure = time.time() - folder.path.joinpath("frozen").stat().st_mtime
    assert seconds_after_failure < 25  # torch elastic waits for 30 s


def test_segfault_reports_its_location(run_cli: CliRunner) -> None:
    overrides = (
        "trusted_packages=[fixtures]",
        "+callbacks.crash={_target_:fixtures.faults.Segfault}",
    )
    result = run_cli(*UNTRACKED, *STRATEGIES["ddp"], *overrides)
    status = result.folder.status
    location = f"{Path(ctypes.__file__)}:"
    assert status["reason"].startswith(f"rank 1 was killed by SIGSEGV in {location}")
    assert (status["rank"], status["log_tail"][-1]) == (1, "Fatal Python error: Segmentation fault")
    assert "in string_at" in status["log_tail"][-2]
    assert "in on_train_batch_start" in status["log_tail"][-3]
    assert "Fatal Python error: Segmentation fault" in result.err
    assert "in string_at" in result.err


def test_reason_of_an_aborted_rank_names_its_flight_recorder_dump(run_job: JobRunner) -> None:
    overrides = (
        "trusted_packages=[fixtures]",
        "+callbacks.crash={_target_:fixtures.faults.AbortWithDump}",
    )
    folder = run_job(*STRATEGIES["ddp"], *overrides, status="failed")
    location, dump = folder.status["reason"].split("; ")
    assert location.startswith(f"rank 1 was killed by SIGABRT in {faults.__file__}:")
    assert dump == f"NCCL Flight Recorder: {folder.path}/flight_recorder_rank_*"
    assert "in on_train_batch_start" in folder.status["log_tail"][-2]


def test_frozen_rank_is_named(run_job: JobRunner) -> None:
    limit = fault_timeout(run_job(*STRATEGIES["fsdp"]))
    frozen = "{_target_:fixtures.faults.FreezeRank,rank:1,step:3}"
    overrides = ("trusted_packages=[fixtures]", f"launch.timeout={limit}")
    job_status = run_job(
        *STRATEGIES["fsdp"], f"+callbacks.frozen={frozen}", *overrides, status="timeout"
    ).status
    assert (
        job_status["reason"] == f"ran longer than launch.timeout={limit} s; rank 1 did not respond"
    )
    assert job_status["rank"] == 1
    assert {line.split(":")[0] for line in job_status["log_tail"]} == {"rank 0"}


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param("single", "raise", marks=EXHAUSTIVE),
        ("fsdp", "kill"),
        pytest.param("ddp", "kill", marks=EXHAUSTIVE),
        pytest.param("pipeline", "kill", marks=EXHAUSTIVE),
        pytest.param("single", "hang", marks=EXHAUSTIVE),
        pytest.param("fsdp", "hang", marks=EXHAUSTIVE),
        pytest.param("fsdp", "raise", marks=EXHAUSTIVE),
        pytest.param("pipeline", "hang", marks=EXHAUSTIVE),
        pytest.param("pipeline", "raise", marks=EXHAUSTIVE),
    ],
)
def test_restart_recovers_from_a_single_fault(
    strategy: str, fault: str, run_job: JobRunner
) -> None:
    overrides = (*STRATEGIES.get(strategy, ()), "checkpoint.every=2")
    reference = run_job(*overrides)
    fault_overrides = (f"+inject={fault}", "+callbacks.inject.once=true", "callbacks.inject.step=5")
    patience = f"launch.timeout={2 * fault_timeout(reference) if fault == 'hang' else 60}"
    restarted_run = run_job(*overrides, *fault_overrides, "launch.max_restarts=1", patience)
    assert restarted_run.status["attempts"] == 2
    assert restarted_run.steps == list(range(1, 9))
    assert restarted_run.column("val/loss") == reference.column("val/loss")
    assert same_weights(restarted_run.weights(8), reference.weights(8))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system that the second checkpoint of a small run fills."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(folder)]
    mount_result = subprocess.run(command, check=False, capture_output=True, text=True)
    if mount_result.returncode:
        pytest.skip(f"no file system can be mounted here: {mount_result.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(n, marks=EXHAUSTIVE) for n in ("fsdp", "pipeline"))]
)
def test_full_disk_loses_only_the_checkpoint(
    strategy: str, small_disk: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(small_disk, shared_cache)
    overrides = (
        *STRATEGIES[strategy],
        "model.width=64",
        "model.layers=2",
        "checkpoint.every=1",
        "checkpoint.keep=0",
    )
    failed = run_job(*overrides, status="failed")
    assert "No space left on device" in failed.status["reason"]
    checkpoints = failed.checkpoints
    assert checkpoints, "the first fits"
    assert manifest.newest_checkpoint(failed.path / "checkpoints") == failed.checkpoint(
        checkpoints[-1]
    )
    assert not list((failed.path / "checkpoints").glob(".partial-*"))


def test_full_disk_at_start_leaves_only_a_status(small_disk: Path, shared_cache: Path) -> None:
    run_job = JobRunner(small_disk, shared_cache)
    filler = small_disk / "filler"
    disk = os.statvfs(small_disk)
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 150 * 1024))
    failed = run_job("parallelism=ddp", status="failed")
    assert "No space left on device" in failed.status["reason"]
    assert failed.status["ended"] is not None
    assert not [path for path in failed.path.rglob("*") if path.name.startswith(".")]
    shutil.rmtree(failed.path)
    with filler.open("ab") as file:
        file.write(bytes(130 * 1024))
    with pytest.raises(ConfigError, match="the disk is full"):
        run_job("parallelism=ddp")
    assert [path for path in small_disk.rglob("*") if path.is_file()] == [filler]


def test_restarts_are_counted_in_the_status(run_job: JobRunner) -> None:
    job_status = run_job("+inject=raise", "launch.max_restarts=2", status="failed").status
    assert job_status["attempts"] == 3


def test_memory_limit_ends_the_run_out_of_memory(run_job: JobRunner) -> None:
    wide_model = ("model.width=2048", "model.feedforward=16384", "launch.memory_limit_gib=2")
    job_status = run_job(*wide_model, status="out_of_memory").status
    assert "launch.memory_limit_gib=null" in [fix["override"] for fix in job_status["cures"]]


def test_callback_with_invalid_arguments_is_rejected(run_job: JobRunner) -> None:
    """The values of a third-party callback are checked by its constructor only."""
    invalid_callback = (
        "+callbacks.late._target_=lightning.pytorch.callbacks.Timer",
        "+callbacks.late.duration=soon",
    )
    with pytest.raises(ConfigError, match=r"callbacks\.late"):
        run_job(*invalid_callback)
    assert not list(run_job.path.glob("job/*"))


def test_rejected_data_of_one_job_does_not_stop_the_sweep(run_cli: CliRunner) -> None:
    (run_cli.cwd / "empty.txt").write_text("")
    small_run = [override for override in UNTRACKED if "megabytes" not in override]
    for name in ("full.txt", "more.txt"):
        (run_cli.cwd / name).write_text("word after word " * 4000)
    result = run_cli(
        "-m", *small_run, "data=text", "data.vocabulary=300",
        "data.paths=[empty.txt],[full.txt,more.txt]", "trainer.max_steps=3",
    )  # fmt: skip
    record = result.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == ["refused", "ok"], result.failure_report
    assert result.code == 2


def test_job_that_cannot_fit_is_rejected_and_the_sweep_continues(run_cli: CliRunner) -> None:
    limits = ("launch.memory_limit_gib=0.001,4", "launch.refuse_unfit=true")
    result = run_cli("-m", *UNTRACKED, *limits, "trainer.max_steps=3")
    assert result.code == 2, result.failure_report
    assert "Traceback" not in result.transcript
    rejected_job, finished_job = result.folder.json("sweep.json")["jobs"]
    assert (rejected_job["status"], finished_job["status"]) == ("refused", "ok")
    assert "launch.refuse_unfit=true: out_of_memory: " in rejected_job["reason"]
    assert "of 1.02 MiB (" in rejected_job["reason"]
    assert not (result.folder.path / "0").exists()
    assert "out_of_memory: " in (result.folder.path / "report.html").read_text("utf-8")
