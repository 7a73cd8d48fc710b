"""One task of a Slurm job after the job: its report page or its requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalewise.commands import slurm_task
from scalewise.launch import executor, slurm_cli
from scalewise.launch.job import Result
from scalewise.run_files import read_json, write_json

WARNED, CANCELLED = 128 + 12, 128 + 15


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a job of a Slurm cluster that accepts requeue requests."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    rendezvous_environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    variables = {
        **ranks,
        **rendezvous_environment,
        "SLURM_ARRAY_JOB_ID": 7,
        "SLURM_ARRAY_TASK_ID": 0,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(executor, "read_task", lambda file: None)
    monkeypatch.setattr(slurm_cli, "job_facts", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setattr(slurm_cli, "requeue_job", lambda job: True)
    folder = tmp_path / "0"
    folder.mkdir()
    write_json(folder / "status.json", {"status": "running", "name": "a job", "world_size": 2})
    return folder


@pytest.mark.parametrize(
    ("status", "code", "rank", "timeouts", "page"),
    [
        ("ok", 0, 0, 1, True),
        ("failed", 1, 0, 1, True),
        ("refused", 2, 0, 1, True),
        ("ok", 0, 1, 1, False),  # rank 0 reports for the job
        ("interrupted", CANCELLED, 0, 1, True),
        ("interrupted", WARNED, 0, 1, False),  # it is queued again
        ("interrupted", WARNED, 0, 0, True),
    ],
)
def test_slurm_task_writes_a_page_at_the_final_outcome(
    status: str,
    code: int,
    rank: int,
    timeouts: int,
    page: bool,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(
        slurm_task, "_run_rank", lambda _folder: Result(status, "why", code, job, {})
    )
    assert slurm_task.main((str(job.parent), "0", str(timeouts))) == code
    assert (job / "report.html").exists() == page
    output = capfd.readouterr().out
    assert (f"report {job / 'report.html'}" in output) == page
    assert ("Slurm requeued the job" in output) == (code == WARNED and timeouts > 0)
    is_last_attempt = "max_num_timeout=0 is reached" in str(
        read_json(job / "status.json").get("reason")
    )
    assert is_last_attempt == (code == WARNED and timeouts == 0)
