"""Damaged records and lost processes are reported in one line each."""

from __future__ import annotations

import errno
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalewise import atomic, cli
from scalewise.errors import ConfigError
from scalewise.launch import job_progress
from scalewise.launch.checkpoint_lookup import reject_running
from scalewise.launch.sweep_resume import resumed_folder
from scalewise.reports import html_report
from scalewise.run_files import read_metrics, write_json
from scalewise.tracking import sweep_record

THIS_HOST = socket.gethostname()
FUTURE_TIME = "2096-10-02T07:06:40+00:00"
UNUSED_PID = 2**22 + 1
"""Process id that Linux never assigns."""


def row(number: int, status: str, **more: object) -> dict[str, object]:
    varied = {"seed": str(number)}
    return {"number": number, "folder": str(number), "status": status, "varied": varied, **more}


def sweep(
    folder: Path, *jobs: object, pid: int = UNUSED_PID, host: str = THIS_HOST, **more: Any
) -> Path:
    process = {"pid": pid, "started": 1.0, "host": host}
    write_json(
        folder / "sweep.json", {"jobs": list(jobs), "process": process, "ended": None} | more
    )
    return folder


def job(folder: Path, **status: object) -> None:
    folder.mkdir()
    write_json(folder / "status.json", {"host": THIS_HOST, "process": UNUSED_PID, **status})


DAMAGED_RECORDS = [
    ({"jobs": "abc"}, "jobs is abc, not a list"),
    ({"jobs": ["a"]}, "jobs[0] is a, not a mapping"),
    (
        {"jobs": [row(0, "ok") | {"number": "a"}]},
        "jobs[0].number is a, not an integer of 0 or more",
    ),
    ({"jobs": [{"number": 0}]}, "jobs[0].folder is missing"),
    (
        {"jobs": [row(0, "ok"), row(1, "ok", folder=7)]},
        "jobs[1].folder is 7, not a folder in this folder",
    ),
    ({"process": "abc"}, "process is abc, not a mapping"),
]


@pytest.mark.parametrize(("record", "message"), DAMAGED_RECORDS)
def test_damaged_sweep_record_is_named(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sweep(tmp_path, **record)
    for reader in (job_progress.read_progress, lambda folder: resumed_folder(str(folder), folder)):
        with pytest.raises(ConfigError, match=r"sweep.json is damaged: ") as excinfo:
            reader(tmp_path)
        assert message in str(excinfo.value), reader


def test_sweep_without_a_process_is_not_resumed(tmp_path: Path) -> None:
    job_fields = {"config_hash": "x", "planned_folder": "0"}
    sweep(tmp_path, row(0, "ok", **job_fields), process={})
    with pytest.raises(ConfigError, match="does not record its process"):
        resumed_folder(str(tmp_path), tmp_path)


def test_jobs_of_a_lost_sweep_are_not_running(tmp_path: Path) -> None:
    sweep(tmp_path, row(0, "running"), row(1, "waiting"))
    job(tmp_path / "0", status="running", started="yesterday")
    progress = job_progress.read_progress(tmp_path)
    assert [job.state for job in progress] == ["lost", "not_run"]
    assert not any(job.is_active for job in progress)
    assert "resume_sweep" in progress[1].reason


@pytest.mark.parametrize("record", [{"ended": "now"}, {"host": "elsewhere"}])
def test_unknown_process_state_is_not_reported(record: dict[str, Any], tmp_path: Path) -> None:
    sweep(tmp_path, row(0, "running"), row(1, "waiting"), **record)
    job(tmp_path / "0", status="running", started="yesterday")
    assert [job.state for job in job_progress.read_progress(tmp_path)] == ["running", "queued"]


def test_running_sweep_is_not_lost(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    process = {"pid": parent.pid, "started": parent.create_time(), "host": THIS_HOST}
    sweep(tmp_path, row(0, "running"), row(1, "waiting"), process=process)
    assert [job.state for job in job_progress.read_progress(tmp_path)] == ["queued", "queued"]


def test_single_run_without_process_is_lost(tmp_path: Path) -> None:
    job(tmp_path / "run", status="running", started=datetime.now(UTC).isoformat())
    assert [job.state for job in job_progress.read_progress(tmp_path / "run")] == ["lost"]


@pytest.mark.parametrize(
    ("pid", "start_time"),
    [(UNUSED_PID, 1.0), (os.getppid(), "yesterday"), (None, None), ("x", 1.0), (os.getppid(), 1.0)],
)
def test_process_liveness_is_detected(pid: object, start_time: object) -> None:
    """In the last case another process reuses the process id."""
    assert not sweep_record.is_same_process(pid, start_time)


def test_undecodable_metrics_rows_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_bytes(b"step,train/loss\n1,2.5\n\xff\x00,3\n")
    assert read_metrics(file) == [{"step": 1, "train/loss": 2.5}]
    file.write_bytes(b"a\xff\x00")
    assert read_metrics(file) == []


def test_newest_attempt_of_a_job_is_shown(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    process = {"pid": parent.pid, "started": parent.create_time(), "host": THIS_HOST}
    sweep(tmp_path, row(0, "running", planned_folder="0"), process=process)
    job(tmp_path / "0", status="interrupted", reason="SIGINT after step 12")
    (tmp_path / "0" / "overrides.txt").touch()
    assert [job.state for job in job_progress.read_progress(tmp_path)] == ["queued"]
    job(tmp_path / "0-2", status="running", name="again")
    (tmp_path / "0-2" / "overrides.txt").touch()
    assert [(job.state, job.name) for job in job_progress.read_progress(tmp_path)] == [
        ("running", "again")
    ]


def test_unwritable_sweep_folder_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_permission_error(folders: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere/.report.html")

    monkeypatch.setattr(html_report, "write_reports", raise_permission_error)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "scalewise: somewhere/.report.html: Permission denied\n"


@pytest.mark.parametrize("reader", ["status", "report"])
@pytest.mark.parametrize(
    ("status", "is_freed"),
    [
        ({"status": "running"}, True),
        ({"status": "running", "process": 1, "started": FUTURE_TIME}, False),
        ({"status": "running", "host": "elsewhere"}, False),
        ({"status": "running", "process": os.getpid(), "started": FUTURE_TIME}, False),
    ],
    ids=["killed", "alive", "of another machine", "of this process"],
)
def test_reserve_of_a_killed_run_is_freed_by_the_next_command(
    status: dict[str, object], is_freed: bool, reader: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job(run, **status)
    atomic.reserve_space(run / "status.json", 100)
    assert cli.main([reader, str(run)]) == 0
    assert (run / ".status.json.reserve").exists() is not is_freed


def test_reserve_of_a_killed_sweep_is_freed(tmp_path: Path) -> None:
    sweep(tmp_path, row(0, "running", config_hash="a", planned_folder="0"))
    job(tmp_path / "0", status="running")
    atomic.reserve_space(tmp_path / "sweep.json", 100)
    atomic.reserve_space(tmp_path / "0" / "status.json", 100)
    assert resumed_folder(str(tmp_path), tmp_path) == tmp_path
    assert not [*tmp_path.rglob(".*.reserve")]


def test_reserve_of_a_running_sweep_is_kept(tmp_path: Path) -> None:
    sweep(tmp_path, row(0, "waiting"), pid=1, process={"pid": 1, "host": THIS_HOST, "started": 4e9})
    atomic.reserve_space(tmp_path / "sweep.json", 100)
    sweep_record.release_reserved(tmp_path)
    assert (tmp_path / ".sweep.json.reserve").exists()


def test_reserve_of_a_killed_run_is_freed_by_its_resume(tmp_path: Path) -> None:
    job(tmp_path / "run", status="running")
    atomic.reserve_space(tmp_path / "run" / "status.json", 100)
    reject_running("last", tmp_path / "run")
    assert not (tmp_path / "run" / ".status.json.reserve").exists()
