"""Unexpected exceptions: one line each, and everything else continues."""

from __future__ import annotations

import errno
import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from scalewise import cli, failures
from scalewise.errors import Interrupted, ScalewiseError
from scalewise.failures import describe_exception, report_errors
from scalewise.launch import job, packed_executor
from scalewise.launch.executor import StartCallback, SweepTask, execute_task
from scalewise.launch.job import JobSpec, Result
from scalewise.launch.outcomes import outcome_of_exception
from scalewise.launch.packed_executor import JobDemand, SlotCapacity
from scalewise.launch.sweep_runner import execute_all
from scalewise.reports import renderer
from scalewise.reports.chart_layout import NO_CHART, ChartPicture
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json
from scalewise.sweep_question import SweepQuestion

Compose = Callable[..., RunConfig]
TOO_MANY = OSError(errno.EMFILE, "Too many open files")
REASON = "OSError: [Errno 24] Too many open files"


def raise_too_many(*_: object, **__: object) -> None:
    raise TOO_MANY


class TestOneLine:
    def test_error_line_names_file_and_line_of_user_code(self, tmp_path: Path) -> None:
        file = tmp_path / "theirs.py"
        file.write_text("import json\n\ndef happen():\n    json.loads('{')\n")
        spec = importlib.util.spec_from_file_location("theirs", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.raises(ValueError, match="property name") as excinfo:
            module.happen()
        assert describe_exception(excinfo.value).startswith(
            "JSONDecodeError: Expecting property name"
        )
        assert describe_exception(excinfo.value).endswith(f" ({file}:4 in happen)")
        assert outcome_of_exception(excinfo.value, 1).reason == describe_exception(excinfo.value)

    def test_error_line_omits_installed_packages(self) -> None:
        error = ZeroDivisionError("by\nzero")
        assert describe_exception(error) == "ZeroDivisionError: by zero"

    def test_error_line_has_bounded_length(self) -> None:
        assert len(describe_exception(ValueError("x" * 10**6))) < failures.MAX_MESSAGE_LENGTH + 100


def test_guard_prints_the_error_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with report_errors("no report"):
        raise_too_many()
    with report_errors("no report"):
        raise ScalewiseError("not now")
    for error in (KeyboardInterrupt(), Interrupted(15, "SIGTERM")):
        with pytest.raises(type(error)), report_errors("no report"):
            raise error
    assert capsys.readouterr().err.splitlines()[0].startswith(f"no report: {REASON}")


class Panic(BaseException):
    """Exception like PyO3's, which derives from BaseException only."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (Panic("index out of bounds"), 1, "Panic: index out of bounds"),
        (MemoryError(), 3, "MemoryError: MemoryError"),
        (TOO_MANY, 1, REASON),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 2, "runs: Permission denied"),
    ],
)
def test_unexpected_error_of_a_command_is_one_line(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dispatch(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.main(["plan"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"scalewise: {message}")
    assert "Traceback" not in err
    if code != 2:
        monkeypatch.setenv(cli.TRACEBACK, "1")
        cli.main(["plan"])
        assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def order(compose: Compose) -> JobSpec:
    return JobSpec(compose("experiment=smoke", "tracking=none"))


def test_failed_launcher_ends_the_status(
    order: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_run_attempt", raise_too_many)
    result = job.execute(order, tmp_path / "run")
    assert (result.status, result.exit_code) == ("failed", 1)
    status = read_json(tmp_path / "run" / "status.json")
    assert status["status"] == "failed"
    assert str(status["reason"]).startswith(REASON)
    assert status["ended"] is not None
    remaining_files = {path.name for path in (tmp_path / "run").iterdir()}
    expected_files = {"overrides.txt", "resolved.yaml", "inputs.json", "status.json", "checkpoints"}
    assert remaining_files == expected_files


def test_full_disk_at_start_is_rejected_and_leaves_nothing(
    order: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job.Status, "reserve", raise_disk_full)
    folder = tmp_path / "runs" / "name" / "run"
    (tmp_path / "kept").touch()
    task = SweepTask(0, order, folder)
    result = execute_task(task, lambda _: None)
    assert result.status == "refused"
    assert f"hydra.run.dir={folder}"[:60] in result.reason
    assert "the disk is full" in result.reason
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_signal_while_a_job_starts_leaves_nothing(
    order: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(job.Status, "write", interrupted)
    result = execute_task(SweepTask(0, order, tmp_path / "runs" / "name" / "run"), lambda _: None)
    assert (result.status, result.exit_code) == ("interrupted", 143)
    assert list(tmp_path.iterdir()) == []


def test_job_that_cannot_start_has_failed(
    order: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalewise.launch.executor.execute", raise_too_many)
    result = execute_task(SweepTask(0, order, tmp_path / "0"), lambda _: None)
    assert result.status == "failed"
    assert result.reason.startswith(REASON)


class FailingExecutor:
    """Executor that ends one job and then fails."""

    def iter_results(
        self, tasks: Sequence[SweepTask], on_start: StartCallback
    ) -> Iterator[tuple[SweepTask, Result]]:
        on_start(tasks[0])
        yield tasks[0], Result("ok", "", 0, tasks[0].folder, {})
        raise_too_many()


def test_failed_executor_records_every_job(order: JobSpec, tmp_path: Path) -> None:
    tasks = [SweepTask(number, order, tmp_path / str(number)) for number in range(3)]
    results = execute_all(
        tasks,
        tmp_path,
        FailingExecutor(),
        command="",
        question=SweepQuestion(""),
        on_start=lambda *_: None,
        on_end=raise_too_many,  # has no other consequence
    )
    assert [result.status for result in results] == ["ok", "failed", "failed"]
    record = read_json(tmp_path / "sweep.json")
    assert record["ended"] is not None
    jobs = record["jobs"]
    assert isinstance(jobs, list)
    assert [job["status"] for job in jobs] == ["ok", "failed", "failed"]
    assert jobs[2]["reason"].startswith(REASON)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


class FailingSupervisors:
    """Supervisor pool whose first supervisor cannot start."""

    stop_signal = 0

    def __init__(self) -> None:
        self.is_active: list[SweepTask] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.is_active)

    def start(self, task: SweepTask, affinity: object) -> None:
        if task.number == 0:
            raise_too_many()
        self.is_active.append(task)

    def wait_for_results(self) -> Iterator[tuple[SweepTask, Result]]:
        task = self.is_active.pop()
        yield task, Result("ok", "", 0, task.folder, {})


def test_packed_job_without_process_does_not_stop_others(order: JobSpec, tmp_path: Path) -> None:
    jobs = [(SweepTask(n, order, tmp_path / str(n)), JobDemand(1, 1)) for n in range(3)]
    capacity = SlotCapacity((0,), 1)
    results = packed_executor._run_jobs(jobs, capacity, False, FailingSupervisors(), lambda _: None)  # type: ignore[arg-type]
    assert {task.number: result.status for task, result in results} == {
        0: "failed",
        1: "ok",
        2: "ok",
    }


class TestRenderer:
    @pytest.fixture(autouse=True)
    def chart_renderer(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[renderer.ChartRenderer]:
        local_renderer = renderer.ChartRenderer()
        monkeypatch.setattr(renderer, "svg", local_renderer.svg)
        yield local_renderer
        local_renderer.close()

    def test_chart_renderer_restarts_once(
        self,
        chart_renderer: renderer.ChartRenderer,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        attempts_file = tmp_path / "tries"
        failing_chrome = tmp_path / "dying"
        failing_chrome.write_text(f"#!/bin/sh\necho x >> {attempts_file}\nkill -ABRT $$\n")
        failing_chrome.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(failing_chrome))
        for reason in (*2 * ["crashed: SIGABRT"], *2 * ["crashed 2 times"]):
            with pytest.raises(renderer.RenderError, match=reason):
                chart_renderer.svg({}, "6.1")
        assert attempts_file.read_text().split() == ["x", "x"]

    def test_missing_chart_renderer_omits_charts_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.executable", "/nowhere/python")

        def render_chart(_: int) -> None:
            renderer.svg({}, "6.1")

        text = ChartPicture(render_chart, "ident", "sentence").desktop_svg  # type: ignore[arg-type]
        assert text.startswith(f"<p>{NO_CHART}: RenderError: cannot start")

    def test_chart_renderer_reports_a_failed_chart_and_continues(
        self, chart_renderer: renderer.ChartRenderer
    ) -> None:
        with pytest.raises(renderer.RenderError, match="conversion failed"):
            chart_renderer.svg({"mark": {"type": 3}}, "6.1")
        chart = {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {}}
        assert chart_renderer.svg(chart, "6.1").startswith("<svg")

    def test_chart_renderer_discards_answers_after_a_signal(
        self, chart_renderer: renderer.ChartRenderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        process = chart_renderer._start_process()
        assert process.stdout is not None
        monkeypatch.setattr(process.stdout, "readline", Mock(side_effect=KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            chart_renderer.svg({"mark": "point"}, "6.1")
        assert process.poll() is not None
        assert chart_renderer._start_process() is not process
