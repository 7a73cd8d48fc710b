"""Progress of jobs read from folders and Slurm."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scalewise import cli
from scalewise.commands import status as status_command
from scalewise.launch import job_progress, slurm_cli
from scalewise.metric_names import METRICS
from scalewise.run_files import read_json, write_json
from scalewise.tracking import sweep_record


def write_job(folder: Path, status: str, num_rows: int = 0, **fields: Any) -> None:
    folder.mkdir(parents=True)
    write_json(folder / "status.json", {"status": status, "name": "a-run", **fields})
    if num_rows:
        write_json(folder / "plan.json", {"steps": 1000})
        lines = [",".join(METRICS)]
        for step in range(1, num_rows + 1):
            values = {"step": str(step), "train/loss": f"{9 - step / 1000}", "time/step_s": "0.5"}
            lines.append(",".join(values.get(key, "") for key in METRICS))
        (folder / "metrics.csv").write_text(
            "\n".join(lines) + "\n401,7."
        )  # the last row is truncated


def write_sweep(folder: Path, *statuses: str) -> Path:
    jobs = [
        {"number": n, "folder": str(n), "varied": {"seed": str(n)}, "status": status}
        for n, status in enumerate(statuses)
    ]
    folder.mkdir(exist_ok=True)
    write_json(folder / "sweep.json", {"jobs": jobs})
    return folder


def test_progress_of_a_running_run(tmp_path: Path) -> None:
    write_job(tmp_path / "run", "running", num_rows=400, attempts=2)
    (job,) = job_progress.read_progress(tmp_path / "run")
    assert (job.step, job.steps, job.loss, job.attempts) == (400, 1000, 8.6, 2)
    assert job.seconds_left == 300.0
    assert job.seconds_silent is not None
    assert job.seconds_silent < 60
    assert status_command.job_remark(job) == "attempt 2"


def test_progress_of_a_silent_run(tmp_path: Path) -> None:
    write_job(tmp_path / "run", "running", num_rows=3)
    for file in (tmp_path / "run").iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
    (job,) = job_progress.read_progress(tmp_path / "run")
    assert status_command.job_remark(job) == "silent for 2 h 00 min"


def test_progress_of_an_ended_run(tmp_path: Path) -> None:
    write_job(tmp_path / "run", "failed", num_rows=5, reason="it broke")
    (job,) = job_progress.read_progress(tmp_path / "run")
    assert (job.seconds_left, job.seconds_silent, job.is_active) == (None, None, False)
    assert status_command.job_remark(job) == "it broke"


def test_progress_of_a_run_that_ends_while_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is read while the run is active; its process has ended at the liveness check."""
    process_fields = {
        "host": socket.gethostname(),
        "process": 2**22 + 1,
        "started": "2026-01-01T00:00:00",
    }
    write_job(tmp_path / "run", "running", **process_fields)
    sweep = write_sweep(tmp_path / "sweep", "running")
    process = {"pid": 2**22 + 1, "started": 1.0, "host": socket.gethostname()}
    record = {**read_json(sweep / "sweep.json"), "process": process, "ended": None}
    write_json(sweep / "sweep.json", record)
    write_job(sweep / "0", "running", **process_fields)

    def end_while_checked(pid: object, start_time: object) -> bool:
        for folder in (tmp_path / "run", sweep / "0"):
            write_json(folder / "status.json", {"status": "ok", "name": "a-run", **process_fields})
        write_json(sweep / "sweep.json", {**record, "ended": "2026-01-01T00:01:00"})
        return False

    monkeypatch.setattr(sweep_record, "is_same_process", end_while_checked)
    assert [job.state for job in job_progress.read_progress(sweep)] == ["ok"]
    write_json(
        tmp_path / "run" / "status.json", {"status": "running", "name": "a-run", **process_fields}
    )
    assert [job.state for job in job_progress.read_progress(tmp_path / "run")] == ["ok"]


def test_progress_reads_are_consistent_during_writes(tmp_path: Path) -> None:
    write_job(tmp_path / "run", "running", num_rows=3)
    stop_event = threading.Event()

    def write() -> None:
        step = 3
        while not stop_event.is_set():
            step += 1
            content = {"status": "running", "name": "a-run", "reason": "x" * (step % 7 * 3000)}
            write_json(tmp_path / "run" / "status.json", content)
            with (tmp_path / "run" / "metrics.csv").open("a", encoding="utf-8") as file:
                for text in (f"\n{step},", f"{step}.5", "," * (len(METRICS) - 2), "\n"):
                    file.write(text)
                    file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        progress_reads = [job_progress.read_progress(tmp_path / "run")[0] for _ in range(300)]
    finally:
        stop_event.set()
        writer.join()
    assert {job.state for job in progress_reads} == {"running"}
    steps = [job.step for job in progress_reads]
    assert steps == sorted(step or 0 for step in steps)
    assert all(
        job.loss in ((job.step or 0) + 0.5, 9 - (job.step or 0) / 1000) for job in progress_reads
    )


def test_progress_before_the_first_metrics(tmp_path: Path) -> None:
    write_job(tmp_path / "run", "running")
    (job,) = job_progress.read_progress(tmp_path / "run")
    assert (job.step, job.steps, job.loss, job.seconds_left) == (None, None, None, None)


def test_progress_of_a_local_sweep(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "ok", "running", "waiting", "refused")
    write_job(tmp_path / "0", "ok", num_rows=1000)
    write_job(tmp_path / "1", "running", num_rows=1)
    states = [job.state for job in job_progress.read_progress(sweep)]
    assert states == ["ok", "running", "queued", "refused"]


@pytest.mark.parametrize(
    ("status", "slurm", "state"),
    [
        ("running", "RUNNING", "running"),
        ("running", "PENDING", "queued"),
        ("running", "", "lost"),
        ("interrupted", "PENDING", "queued"),
        ("interrupted", "COMPLETING", "running"),
        ("interrupted", "", "interrupted"),
        ("ok", "COMPLETING", "ok"),
        ("ok", "", "ok"),
        ("pruned", "COMPLETING", "pruned"),
        ("", "PENDING", "queued"),
        ("", "RUNNING", "queued"),
        ("", "", "lost"),
    ],
)
def test_progress_of_a_slurm_job(
    status: str, slurm: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sweep(tmp_path, "running")
    (tmp_path / "slurm").mkdir()
    write_json(tmp_path / "slurm" / "jobs.json", {"0": "12_0"})
    if status:
        write_job(tmp_path / "0", status)
    monkeypatch.setattr(slurm_cli, "has_slurm", lambda: True)
    monkeypatch.setattr(slurm_cli, "job_states", lambda: {"12_0": slurm} if slurm else {})
    assert [job.state for job in job_progress.read_progress(tmp_path)] == [state]


def test_progress_without_a_slurm_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(tmp_path, "running", "running")
    (tmp_path / "slurm").mkdir()
    write_json(tmp_path / "slurm" / "jobs.json", {"0": "12_0", "1": "12_1"})
    write_job(tmp_path / "0", "running")
    monkeypatch.setattr(slurm_cli, "has_slurm", lambda: False)
    assert [job.state for job in job_progress.read_progress(tmp_path)] == ["running", "queued"]


class TestStatusCommand:
    def test_status_prints_once_without_a_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sweep = write_sweep(tmp_path / "sweep", "running", "waiting")
        write_job(sweep / "0", "running", num_rows=400)
        assert cli.main(["status", str(sweep)]) == 0
        stdout = capsys.readouterr().out
        assert f"{sweep}: 1 running, 1 queued" in stdout.replace("\n", "")
        assert "400/1000  8.6000  5 min 00 s" in stdout

    def test_status_rejects_other_folders(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["status"]) == 2
        assert cli.main(["status", str(tmp_path)]) == 2
        stderr = capsys.readouterr().err
        assert "no folder given" in stderr
        assert "is neither a run (status.json) nor a sweep (sweep.json)" in stderr

    def test_status_watches_until_all_jobs_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sweep = write_sweep(tmp_path / "sweep", "running")
        write_job(sweep / "0", "running", num_rows=2)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        sleeps: list[float] = []

        def pause(seconds: float) -> None:
            sleeps.append(seconds)
            if len(sleeps) == 2:
                record = json.loads((sweep / "0" / "status.json").read_text())
                write_json(sweep / "0" / "status.json", {**record, "status": "ok"})

        monkeypatch.setattr(status_command.time, "sleep", pause)
        assert cli.main(["status", str(sweep)]) == 0
        assert len(sleeps) == 2
        assert "1 ok" in capsys.readouterr().out

    def test_status_ends_watching_on_ctrl_c(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_job(tmp_path / "run", "running")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(status_command.time, "sleep", interrupt)
        assert cli.main(["status", str(tmp_path / "run")]) == 0
