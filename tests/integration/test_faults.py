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
LONG = pytest.mark.exhaustive
LIMIT = "launch.timeout=10"


@pytest.fixture(scope="module")
def sweep(cli_runner_in: Callable[[str], CliRunner]) -> tuple[CliResult, CliProcess]:
    """Five jobs, four faults, W&B offline."""
    runner = cli_runner_in("faults")
    command = runner.start("-m", *TINY, "trainer.max_steps=5", LIMIT, f"+inject={','.join(FAULTS)}")
    return command.wait(), command


def test_sweep_records_the_status_of_every_job(sweep: tuple[CliResult, CliProcess]) -> None:
    ended, _ = sweep
    for job, (status, code, reason) in zip(ended.folder.jobs, FAULTS.values(), strict=True):
        recorded = job.status
        assert (recorded["status"], recorded["exit_code"]) == (status, code), recorded["reason"]
        assert reason in recorded["reason"], job
        assert not (job.path / ".ranks").exists(), job
        assert (job.path / "report.html").is_file(), job


def test_sweep_json_lists_job_statuses(sweep: tuple[CliResult, CliProcess]) -> None:
    ended, _ = sweep
    record = ended.folder.json("sweep.json")
    assert [job["status"] for job in record["jobs"]] == [s for s, _, _ in FAULTS.values()]
    assert record["varying"] == {"inject": list(FAULTS)}
    assert record["ended"] is not None
    assert ended.folder.path.joinpath("report.html").is_file()


def test_sweep_command_fails_without_a_traceback(
    sweep: tuple[CliResult, CliProcess],
) -> None:
    ended, _ = sweep
    assert ended.code == 1
    assert "Traceback" not in ended.transcript
    assert "job 2 out_of_memory" in ended.out


def test_sweep_leaves_no_process(sweep: tuple[CliResult, CliProcess]) -> None:
    _, command = sweep
    assert command.remaining_processes(within=2) == []


def test_failed_rank_keeps_its_log_tail(sweep: tuple[CliResult, CliProcess]) -> None:
    ended, _ = sweep
    assert any("fault_injection.py" in line for line in ended.folder.jobs[1].status["log_tail"])


ENDINGS = {
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
USUAL = {("ddp", "oom"), ("pipeline", "kill")}


def fault_timeout(uninterrupted: RunDir) -> int:
    """Timeout that is long enough for a job to reach its fault on a busy machine, in seconds."""
    return max(8, 2 * ceil(uninterrupted.status["seconds"]))


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param(strategy, fault, marks=() if usual else LONG)
        for strategy in STRATEGIES
        for fault in ENDINGS
        for usual in [(strategy, fault) in USUAL]
    ],
)
def test_fault_of_one_rank_ends_the_others(strategy: str, fault: str, run_job: JobRunner) -> None:
    limit = fault_timeout(run_job(*STRATEGIES[strategy]))
    start = time.monotonic()
    where = [*STRATEGIES[strategy], f"+inject={fault}", "callbacks.inject.rank=1"]
    noticed = limit if fault == "hang" else 0  # only the timeout detects it
    if noticed:
        where.append(f"launch.timeout={noticed}")
    status, reason = ENDINGS[fault]
    recorded = run_job(*where, status=status).status
    assert time.monotonic() - start < noticed + 15
    assert reason in recorded["reason"]
    assert recorded["rank"] == 1
    if fault == "hang":
        assert any("rank 1: " in line and "in happen" in line for line in recorded["log_tail"])


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


def test_frozen_rank_is_named(run_job: JobRunner) -> None:
    limit = fault_timeout(run_job(*STRATEGIES["fsdp"]))
    frozen = "{_target_:fixtures.faults.FreezeRank,rank:1,step:3}"
    overrides = ("trusted_packages=[fixtures]", f"launch.timeout={limit}")
    recorded = run_job(
        *STRATEGIES["fsdp"], f"+callbacks.frozen={frozen}", *overrides, status="timeout"
    ).status
    assert recorded["reason"] == f"ran longer than launch.timeout={limit} s; rank 1 did not respond"
    assert recorded["rank"] == 1
    assert {line.split(":")[0] for line in recorded["log_tail"]} == {"rank 0"}


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param("single", "raise", marks=LONG),
        ("fsdp", "kill"),
        pytest.param("ddp", "kill", marks=LONG),
        pytest.param("pipeline", "kill", marks=LONG),
        pytest.param("single", "hang", marks=LONG),
        pytest.param("fsdp", "hang", marks=LONG),
        pytest.param("fsdp", "raise", marks=LONG),
        pytest.param("pipeline", "hang", marks=LONG),
        pytest.param("pipeline", "raise", marks=LONG),
    ],
)
def test_restart_recovers_from_a_single_fault(
    strategy: str, fault: str, run_job: JobRunner
) -> None:
    parts = (*STRATEGIES.get(strategy, ()), "checkpoint.every=2")
    undisturbed = run_job(*parts)
    once = (f"+inject={fault}", "+callbacks.inject.once=true", "callbacks.inject.step=5")
    patience = f"launch.timeout={2 * fault_timeout(undisturbed) if fault == 'hang' else 60}"
    mended = run_job(*parts, *once, "launch.max_restarts=1", patience)
    assert mended.status["attempts"] == 2
    assert mended.steps == list(range(1, 9))
    assert mended.column("val/loss") == undisturbed.column("val/loss")
    assert same_weights(mended.weights(8), undisturbed.weights(8))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that the second checkpoint of a tiny run fills."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(n, marks=LONG) for n in ("fsdp", "pipeline"))]
)
def test_full_disk_loses_only_the_checkpoint(
    strategy: str, small_disk: Path, shared_cache: Path
) -> None:
    run_job = JobRunner(small_disk, shared_cache)
    parts = (
        *STRATEGIES[strategy],
        "model.width=64",
        "model.layers=2",
        "checkpoint.every=1",
        "checkpoint.keep=0",
    )
    failed = run_job(*parts, status="failed")
    assert "No space left on device" in failed.status["reason"]
    kept = failed.checkpoints
    assert kept, "the first fits"
    assert manifest.newest_checkpoint(failed.path / "checkpoints") == failed.checkpoint(kept[-1])
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
    recorded = run_job("+inject=raise", "launch.max_restarts=2", status="failed").status
    assert recorded["attempts"] == 3


def test_memory_limit_ends_the_run_out_of_memory(run_job: JobRunner) -> None:
    wide = ("model.width=2048", "model.feedforward=16384", "launch.memory_limit_gib=2")
    recorded = run_job(*wide, status="out_of_memory").status
    assert "launch.memory_limit_gib=null" in [fix["override"] for fix in recorded["cures"]]


def test_callback_with_invalid_arguments_is_rejected(run_job: JobRunner) -> None:
    """One of somebody else's, whose values only it can judge."""
    bad = (
        "+callbacks.late._target_=lightning.pytorch.callbacks.Timer",
        "+callbacks.late.duration=soon",
    )
    with pytest.raises(ConfigError, match=r"callbacks\.late"):
        run_job(*bad)
    assert not list(run_job.path.glob("job/*"))


def test_rejected_data_of_one_job_does_not_stop_the_sweep(run_cli: CliRunner) -> None:
    (run_cli.cwd / "empty.txt").write_text("")
    small = [part for part in UNTRACKED if "megabytes" not in part]
    for name in ("full.txt", "more.txt"):
        (run_cli.cwd / name).write_text("word after word " * 4000)
    result = run_cli(
        "-m", *small, "data=text", "data.vocabulary=300",
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
    refused, ran = result.folder.json("sweep.json")["jobs"]
    assert (refused["status"], ran["status"]) == ("refused", "ok")
    assert "launch.refuse_unfit=true: out_of_memory: " in refused["reason"]
    assert "of 1.02 MiB (" in refused["reason"]
    assert not (result.folder.path / "0").exists()
    assert "out_of_memory: " in (result.folder.path / "report.html").read_text("utf-8")
