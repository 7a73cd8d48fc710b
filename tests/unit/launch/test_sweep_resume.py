"""Resuming a sweep: job identity, missing jobs and rejections."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from scalewise.commands.plan import PlanCommand
from scalewise.commands.train import TrainCommand
from scalewise.config.app import Command, run_command
from scalewise.errors import ConfigError
from scalewise.launch import slurm_cli, sweep_resume
from scalewise.launch.config_hash import config_hash
from scalewise.launch.executor import SequentialExecutor, SweepTask
from scalewise.launch.job import JobSpec, attempt_folders
from scalewise.launch.sweep_resume import (
    EarlierJob,
    earlier_jobs,
    match_jobs,
    parse_resume_request,
    resumed_folder,
)
from scalewise.launch.sweep_runner import claim_sweep_folder, execute_all
from scalewise.run_config import RunConfig
from scalewise.run_files import write_json
from scalewise.sweep_question import SweepQuestion

Compose = Callable[..., RunConfig]


def job(number: int, digest: str = "a", **varied: str) -> EarlierJob:
    varied_settings = {key.replace("__", "."): value for key, value in varied.items()}
    return EarlierJob(number, digest, varied_settings, Path(str(number)), (), None)


@pytest.mark.parametrize(
    ("expected", "earlier", "numbers"),
    [
        ([("a", {}), ("b", {})], [job(0, "b"), job(1, "a")], [1, 0]),
        ([("a", {}), ("a", {})], [job(0)], [0, None]),
        ([("a", {}), ("a", {}), ("a", {})], [job(0), job(1)], [0, 1, None]),
        ([("a", {"launch.timeout": "2"})], [job(0, launch__timeout="1")], [None]),
        (
            [("a", {"launch.timeout": "2"}), ("a", {"launch.timeout": "1"})],
            [job(0, launch__timeout="1"), job(1, launch__timeout="2")],
            [1, 0],
        ),
        ([("a", {"launch.timeout": "2"})], [job(0, seed="1")], [0]),
        ([("a", {"optimizer.lr": "1e-3"})], [job(0, optimizer__lr="0.001")], [0]),
        ([("c", {})], [job(0)], [None]),
    ],
)
def test_resume_matches_each_job_once(
    expected: list[Any], earlier: list[EarlierJob], numbers: list[int | None]
) -> None:
    matches = [None if match is None else match.number for match in match_jobs(expected, earlier)]
    assert matches == numbers


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder of a sweep with one job of every status."""
    folder = tmp_path / "name" / "2026-01-01_00-00-00"
    statuses = ["ok", "failed", "timeout", "interrupted", "running", "waiting", "refused"]
    job_records = []
    for number, status in enumerate(statuses):
        job_records.append(
            {
                "number": number,
                "planned_folder": str(number),
                "folder": str(number),
                "config_hash": str(number),
                "varied": {"seed": str(number)},
                "status": status,
                "reason": "by the plan" if status == "refused" else "",
            }
        )
        if status not in ("waiting", "refused"):
            write_job_folder(folder / str(number), status)
    process = {"pid": 2**22 + 1, "started": 1.0, "host": socket.gethostname()}
    write_json(folder / "sweep.json", {"jobs": job_records, "ended": None, "process": process})
    return folder


def write_job_folder(attempt: Path, status: str, digest: str | None = None) -> None:
    attempt.mkdir(parents=True)
    (attempt / "overrides.txt").touch()
    digest = attempt.name.partition("-")[0] if digest is None else digest
    codes = {"ok": 0, "failed": 1, "timeout": 4, "interrupted": 143}
    content = {"status": status, "exit_code": codes.get(status), "process": 2**22 + 1}
    content["config_hash"] = digest
    host = {"host": socket.gethostname(), "started": "2026-01-01T00:00:00+00:00"}
    write_json(attempt / "status.json", {**content, **host})


def changed_status(folder: Path, **changes: object) -> None:
    content = sweep_resume.read_json(folder / "status.json")
    write_json(folder / "status.json", {**content, **changes})


def changed_record(folder: Path, **changes: object) -> None:
    content = sweep_resume.read_json(folder / "sweep.json")
    write_json(folder / "sweep.json", {**content, **changes})


class TestMissingJobs:
    def missing(self, folder: Path, *retry: str) -> list[int]:
        return [job.number for job in earlier_jobs(folder, retry) if job.result is None]

    def test_missing_jobs_are_those_without_outcome(self, sweep: Path) -> None:
        assert self.missing(sweep) == [3, 4, 5]

    def test_missing_jobs_include_failures_on_request(self, sweep: Path) -> None:
        assert self.missing(sweep, "failed") == [1, 3, 4, 5]
        assert self.missing(sweep, "timeout", "refused") == [2, 3, 4, 5, 6]

    def test_missing_jobs_are_read_from_folders(self, sweep: Path) -> None:
        for name, status in (("4-2", "interrupted"), ("4-3", "ok"), ("1-2", "interrupted")):
            write_job_folder(sweep / name, status)
        assert self.missing(sweep) == [1, 3, 5]
        earlier = earlier_jobs(sweep, ())
        assert earlier[4].result is not None
        assert earlier[4].result.folder == sweep / "4-3"
        assert [path.name for path in earlier[1].attempts] == ["1-2", "1"]

    def test_missing_jobs_include_an_empty_folder(self, sweep: Path) -> None:
        (sweep / "5").mkdir()
        (sweep / "5" / "overrides.txt").touch()
        assert self.missing(sweep) == [3, 4, 5]
        assert earlier_jobs(sweep, ())[5].attempts == ()

    def test_missing_jobs_ignore_another_config_hash(self, sweep: Path) -> None:
        write_job_folder(sweep / "3-2", "ok", digest="of another job")
        changed_status(sweep / "0", config_hash="of another job")
        assert self.missing(sweep) == [0, 3, 4, 5]
        assert [path.name for path in earlier_jobs(sweep, ())[3].attempts] == ["3"]

    def test_missing_jobs_recompute_an_absent_hash(self, sweep: Path, compose: Compose) -> None:
        run = compose("seed=3", "callbacks.guard.factor=3")
        for number, seed in (("0", run), ("1", compose("seed=4"))):
            changed_status(sweep / number, config_hash=None)
            (sweep / number / "resolved.yaml").write_text(yaml.safe_dump(seed.as_dict()))
        job_records = sweep_resume.read_json(sweep / "sweep.json")["jobs"]
        job_records[0]["config_hash"] = job_records[1]["config_hash"] = config_hash(run)
        changed_record(sweep, jobs=job_records)
        assert self.missing(sweep) == [1, 3, 4, 5]
        (sweep / "0" / "resolved.yaml").unlink()
        assert self.missing(sweep) == [0, 1, 3, 4, 5]

    def test_missing_jobs_keep_the_rejection_reason(self, sweep: Path) -> None:
        result = earlier_jobs(sweep, ())[6].result
        assert result is not None
        assert (result.status, result.reason, result.exit_code) == ("refused", "by the plan", 2)


def test_resume_numbers_new_jobs_after_the_last(sweep: Path, compose: Compose) -> None:
    earlier = earlier_jobs(sweep, ())
    tasks = [
        SweepTask(number, JobSpec(compose(f"seed={number + 1}"), varied={}), sweep / str(number))
        for number in range(2)
    ]
    new_tasks, earlier_tasks = sweep_resume.renumber_tasks(tasks, earlier, sweep)
    assert [(task.number, task.folder.name) for task in new_tasks] == [(7, "7"), (8, "8")]
    assert earlier_tasks == {}


def test_attempts_are_newest_first(tmp_path: Path) -> None:
    assert attempt_folders(tmp_path / "3") == ()
    for name in ("3", "3-2", "3-4"):
        write_job_folder(tmp_path / name, "failed")
    assert [path.name for path in attempt_folders(tmp_path / "3")] == ["3-2", "3"]


def test_record_of_removed_jobs_is_updated(sweep: Path) -> None:
    write_job_folder(sweep / "4-2", "ok")
    messages: list[object] = []
    none: dict[str, Any] = {"on_start": messages.append, "on_end": messages.append}
    assert (
        execute_all([], sweep, SequentialExecutor(), command="", question=SweepQuestion(""), **none)
        == []
    )
    job_records = sweep_resume.read_json(sweep / "sweep.json")["jobs"]
    statuses = ["ok", "failed", "timeout", "interrupted", "ok", "interrupted", "refused"]
    assert [job_record["status"] for job_record in job_records] == statuses
    assert job_records[4]["folder"] == "4-2"


class TestFolder:
    def test_resume_last_is_the_newest_of_the_name(self, sweep: Path) -> None:
        assert resumed_folder("last", sweep.with_name("2026-02-01_00-00-00")) == sweep

    def test_resume_last_is_the_latest_utc_start(self, sweep: Path) -> None:
        changed_record(sweep, started="2026-01-01T09:00:00+09:00")
        later_sweep = sweep.with_name("2025-12-31_23-30-00")
        shutil.copytree(sweep, later_sweep)
        changed_record(later_sweep, started="2025-12-31T23:30:00-05:00")
        assert resumed_folder("last", sweep.with_name("now")) == later_sweep

    def test_new_sweep_gets_its_own_folder(self, sweep: Path) -> None:
        with claim_sweep_folder(sweep) as lock:
            assert lock.folder.name == f"{sweep.name}-2"
        with (
            claim_sweep_folder(sweep.with_name("other")) as lock,
            claim_sweep_folder(lock.folder) as second_lock,
        ):
            assert (lock.folder.name, second_lock.folder.name) == ("other", "other-2")

    def test_resume_rejects_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("a file")
        with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*: is a file; set a"):
            claim_sweep_folder(tmp_path / "file")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_resume_requires_a_sweep(self, tmp_path: Path) -> None:
        for request, reason in (
            ("last", "no sweep under"),
            (str(tmp_path), "no readable sweep.json"),
        ):
            with pytest.raises(ConfigError, match=reason):
                resumed_folder(request, tmp_path / "name" / "now")

    def test_resume_requires_the_same_version(self, sweep: Path) -> None:
        job_record = {"number": 0, "folder": "0", "status": "ok", "varied": {}}
        changed_record(sweep, jobs=[job_record])
        with pytest.raises(ConfigError, match="could not resume"):
            resumed_folder(str(sweep), sweep)

    def test_resume_rejects_a_running_sweep(self, sweep: Path) -> None:
        parent = psutil.Process(os.getppid())
        process = {"pid": parent.pid, "started": parent.create_time()}
        changed_record(sweep, process={**process, "host": socket.gethostname()})
        with pytest.raises(
            ConfigError, match=f"the sweep is still running, as process {parent.pid}"
        ):
            resumed_folder(str(sweep), sweep)
        changed_record(sweep, process={**process, "host": "elsewhere"})
        with pytest.raises(ConfigError, match=f"its process {parent.pid} on elsewhere"):
            resumed_folder(str(sweep), sweep)
        changed_record(sweep, ended="2026-01-01T00:00:00+00:00")
        assert resumed_folder(str(sweep), sweep) == sweep

    def test_resume_accepts_a_reused_process_id(self, sweep: Path) -> None:
        process = {"pid": os.getppid(), "started": 1.0, "host": socket.gethostname()}
        changed_record(sweep, process=process)
        assert resumed_folder(str(sweep), sweep) == sweep

    def test_resume_rejects_running_jobs(self, sweep: Path) -> None:
        status = sweep_resume.read_json(sweep / "4" / "status.json")
        process_fields = {"process": os.getppid(), "started": "2036-01-01T00:00:00+00:00"}
        write_json(sweep / "4" / "status.json", {**status, **process_fields})
        with pytest.raises(ConfigError, match=f"job 4 is still running, as process {os.getppid()}"):
            resumed_folder(str(sweep), sweep)

    @pytest.mark.parametrize(
        ("states", "expected_reason"),
        [
            (
                {"12_1": "PENDING", "9_0": "RUNNING"},
                "still has 1 job of the sweep, in arrays 12.*scancel",
            ),
            (None, "does not respond, and may still have jobs of the sweep, in arrays 11 12"),
            ({"9_0": "RUNNING"}, ""),
        ],
    )
    def test_resume_rejects_queued_slurm_jobs(
        self,
        states: dict[str, str] | None,
        expected_reason: str,
        sweep: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Jobs that are still queued or running would run twice."""
        (sweep / "slurm").mkdir()
        write_json(sweep / "slurm" / "jobs.json", {"0": "11_0", "1": "12_1"})
        monkeypatch.setattr(slurm_cli, "has_slurm", lambda: True)
        monkeypatch.setattr(slurm_cli, "job_states", lambda: states)
        if expected_reason:
            with pytest.raises(ConfigError, match=expected_reason):
                resumed_folder(str(sweep), sweep)
        else:
            assert resumed_folder(str(sweep), sweep) == sweep


class TestResumeOptions:
    def test_resume_options_are_read_from_the_command_line(self) -> None:
        request, remaining_overrides = parse_resume_request(
            ["-m", "seed=1,2", "resume_sweep=last", "retry=failed,timeout"]
        )
        assert remaining_overrides == ["-m", "seed=1,2"]
        assert request is not None
        assert (request.sweep, request.retry) == ("last", ("failed", "timeout"))
        assert parse_resume_request(["-m", "seed=1,2"]) == (None, ["-m", "seed=1,2"])

    @pytest.mark.parametrize(
        ("options", "issue"),
        [
            (["retry=failed"], "no sweep to resume is given; add resume_sweep=last"),
            (["resume_sweep="], "no sweep to resume"),
            (
                ["resume_sweep=last", "retry=fialed"],
                "retry=fialed: is not a status that can be retried; did",
            ),
            (["resume_sweep=last", "retry=ok"], "retry=ok: is not a status that can be retried"),
        ],
    )
    def test_resume_options_are_validated(self, options: list[str], issue: str) -> None:
        with pytest.raises(ConfigError) as excinfo:
            parse_resume_request(options)
        assert issue in str(excinfo.value)

    @pytest.mark.parametrize("command", [TrainCommand, lambda _, request: PlanCommand(request)])
    @pytest.mark.parametrize("overrides", [[], ["-m", "seed=1,2"]])
    def test_resume_options_leave_nothing_when_rejected(
        self,
        overrides: list[str],
        command: Callable[..., Command],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        request, remaining_overrides = parse_resume_request([*overrides, "resume_sweep=last"])
        with pytest.raises(
            ConfigError, match="single run" if not overrides else "there is no sweep"
        ):
            run_command(command(remaining_overrides, request), remaining_overrides)
        assert list(tmp_path.iterdir()) == []
