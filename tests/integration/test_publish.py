"""``scalewise publish`` of sweeps with the W&B client: complete uploads, no duplicates, faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.cli_runner import TINY, CliResult, CliRunner, RunDir
from fixtures.wandb_http import STREAM, UPLOAD
from fixtures.wandb_publish import (
    KEY,
    SINGLE_RETRY,
    assert_rows_are_those_of,
    publish,
    run_of,
    start_server,
    write_operations,
)
from fixtures.wandb_server import ENTITY, ServedRun, WandbServer
from fixtures.wandb_views import Views

from scalewise.path_lock import PathLock

EXHAUSTIVE = pytest.mark.exhaustive
FILES = {"resolved.yaml", "overrides.txt", "status.json", "plan.json", "summary.json"}
FILES |= {"metrics.csv", "report.html"}


@pytest.fixture(scope="module")
def offline_sweep(cli_runner_in: Callable[[str], CliRunner]) -> RunDir:
    """Offline sweep of two jobs, one with an adapter."""
    return cli_runner_in("offline")("-m", *TINY, "adapter=none,lora", "seed=3").assert_ok().folder


@pytest.fixture
def sweep(offline_sweep: RunDir, tmp_path: Path) -> RunDir:
    """Copy of the offline sweep for one test."""
    copied_sweep = tmp_path / offline_sweep.path.relative_to(offline_sweep.path.parents[2])
    shutil.copytree(offline_sweep.path, copied_sweep, symlinks=True)
    return RunDir(copied_sweep)


class TestPublishSweep:
    """Offline sweep that is published twice."""

    @pytest.fixture(scope="class")
    @classmethod
    def published(
        cls, offline_sweep: RunDir, cli_runner_in: Callable[[str], CliRunner]
    ) -> tuple[WandbServer, RunDir, CliResult, CliResult]:
        runner = cli_runner_in("published")
        sweep_folder = runner.cwd / offline_sweep.path.relative_to(offline_sweep.path.parents[2])
        shutil.copytree(offline_sweep.path, sweep_folder, symlinks=True)
        views = Views()
        with start_server(views) as server:
            first = publish(runner, server, sweep_folder).assert_ok()
            times_created = [run.times_created for run in server.runs.values()]
            second_result = publish(runner, server, sweep_folder).assert_ok()
        assert [run.times_created for run in server.runs.values()] == times_created
        assert [view.saves for view in views.of_type("runs")] == [2], "one report, updated"
        return server, RunDir(sweep_folder), first, second_result

    Published = tuple[WandbServer, RunDir, CliResult, CliResult]

    def test_published_jobs_are_one_group_in_order(self, published: Published) -> None:
        server, sweep, *_ = published
        assert list(server.runs) == [job.status["wandb"]["id"] for job in sweep.jobs]
        group = f"{sweep.path.parent.name}/{sweep.path.name}"
        assert [run.input["groupName"] for run in server.runs.values()] == [group, group]
        assert {run.input["jobType"] for run in server.runs.values()} == {"train"}
        assert {run.state for run in server.runs.values()} == {"finished"}
        assert server.unexpected == []

    def test_published_history_has_every_step_once(self, published: Published) -> None:
        server, sweep, *_ = published
        for job in sweep.jobs:
            assert_rows_are_those_of(job, run_of(server, job))
            assert run_of(server, job).summary["status"] == "ok", job

    def test_published_config_names_the_run_folder(self, published: Published) -> None:
        server, sweep, *_ = published
        for job in sweep.jobs:
            config = run_of(server, job).config
            assert config["folder"].endswith(str(job.path.relative_to(job.path.parents[3]))), job
            assert config["host"], job
            assert config["model"]["width"] == 32, job

    def test_published_files_equal_the_folder(self, published: Published) -> None:
        server, sweep, *_ = published
        for job in sweep.jobs:
            files = run_of(server, job).files
            assert set(files) >= FILES, job
            for name in FILES:
                assert files[name] == (job.path / name).read_bytes(), name

    def test_published_summary_compares_planned_with_measured(self, published: Published) -> None:
        server, sweep, *_ = published
        first_job, _ = sweep.jobs
        run, plan = run_of(server, first_job), first_job.json("plan.json")
        metrics = first_job.summary["metrics"]
        assert run.summary["plan/peak_bytes"] == plan["plan/peak_bytes"]
        assert run.summary["final/memory/peak_bytes"] == metrics["memory/peak_bytes"]
        breakdown = table_of(run, "plan/ledger")
        assert breakdown["columns"] == ["entry", "bytes_at_peak"]
        assert sum(size for _, size in breakdown["data"]) == plan["plan/peak_bytes"]
        assert (
            max(size for _, size in table_of(run, "plan/phases")["data"]) == plan["plan/peak_bytes"]
        )
        measured_by_key = {
            row[0]: row[2:] for row in table_of(run, "plan/against_measured")["data"]
        }
        predicted, measured, ratio = measured_by_key["memory/peak_bytes"]
        assert (predicted, measured) == (plan["plan/peak_bytes"], metrics["memory/peak_bytes"])
        assert ratio == pytest.approx(predicted / measured)
        assert dict(table_of(run, "memory/measured")["data"])["peak"] == measured

    def test_published_checkpoints_are_reference_artifacts(self, published: Published) -> None:
        server, sweep, *_ = published
        first_job, second_job = sweep.jobs
        last = first_job.checkpoint(8)
        (checkpoint,) = [a for a in server.artifacts if a.run == first_job.status["wandb"]["id"]]
        assert checkpoint.aliases >= {"last", "best", last.name}
        assert checkpoint.files == {}
        for name, entry in checkpoint.manifest["contents"].items():
            assert entry["ref"] == f"file://{last.resolve() / name}", name
        kinds = {a.kind: a for a in server.artifacts if a.run == second_job.status["wandb"]["id"]}
        assert set(kinds) == {"checkpoint", "adapter"}
        assert set(kinds["adapter"].files) == {"adapter.safetensors"}

    def test_publish_records_links_in_the_folder(self, published: Published) -> None:
        _, sweep, first, _ = published
        urls = [job.status["wandb"]["url"] for job in sweep.jobs]
        assert all(f"/{ENTITY}/scalewise/runs/" in url for url in urls)
        assert all(url in first.out for url in urls)
        report = sweep.json("sweep.json")["wandb"]["report"]
        assert first.out.count(report) == 1
        assert all(url in (sweep.path / "report.html").read_text("utf-8") for url in urls)

    def test_publish_again_sends_nothing(self, published: Published) -> None:
        server, *_, second_result = published
        assert {
            name for name in write_operations(server) if "iew" not in name and "roject" not in name
        } == set()
        assert "not uploaded" not in second_result.out

    def test_publish_writes_the_api_key_nowhere(self, published: Published) -> None:
        _, _, first, second_result = published
        for result in (first, second_result):
            assert KEY not in result.transcript, result.command
        assert_key_is_nowhere(published[1].path)


def table_of(run: ServedRun, key: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.files[run.summary[key]["path"]])
    return content


def assert_key_is_nowhere(*paths: Path) -> None:
    files = [file for path in paths for file in path.rglob("*") if file.is_file()]
    assert [str(file) for file in files if KEY.encode() in file.read_bytes()] == []


def test_publish_uploads_weights_on_request(sweep: RunDir, run_cli: CliRunner) -> None:
    complete_job, job_without_weights = sweep.jobs
    for job, upload_option in ((complete_job, "checkpoints"), (job_without_weights, "none")):
        text = (job.path / "resolved.yaml").read_text("utf-8")
        assert "log_artifacts: files" in text, job
        changed_text = text.replace("log_artifacts: files", f"log_artifacts: {upload_option}")
        (job.path / "resolved.yaml").write_text(changed_text)
    with start_server() as server:
        publish(run_cli, server, complete_job.path, job_without_weights.path).assert_ok()
    (checkpoint,) = server.artifacts
    assert checkpoint.run == complete_job.status["wandb"]["id"]
    for name, content in checkpoint.files.items():
        assert content == (complete_job.checkpoint(8) / name).read_bytes(), name
    assert set(checkpoint.files) > {"manifest.json", "training.pt"}
    assert not FILES & set(run_of(server, job_without_weights).files)


@pytest.mark.parametrize(
    "fault",
    [
        STREAM,
        pytest.param(UPLOAD, marks=EXHAUSTIVE),
        pytest.param("CommitArtifact", marks=EXHAUSTIVE),
    ],
)
def test_publish_resends_history_that_the_server_lost(
    fault: str, sweep: RunDir, run_cli: CliRunner
) -> None:
    """The client marks history as sent; the server state decides."""
    job = sweep.jobs[0]
    with start_server(faults={fault: 500}) as server:
        result = publish(run_cli, server, job.path, env=SINGLE_RETRY)
        assert result.code == 1
        assert "not uploaded" in result.out
        assert "try again later" in result.out
        server.faults.clear()
        publish(run_cli, server, job.path).assert_ok()
    assert_rows_are_those_of(job, run_of(server, job))
    assert set(run_of(server, job).files) >= FILES
    assert [artifact.state for artifact in server.artifacts].count("COMMITTED") == 1


@pytest.mark.exhaustive
def test_publish_continues_after_a_failed_job_or_report(sweep: RunDir, run_cli: CliRunner) -> None:
    damaged_job, complete_job = sweep.jobs
    (log,) = damaged_job.path.glob("wandb/*run-*/run-*.wandb")
    log.write_bytes(b"torn")
    with start_server(faults={"upsertView": 403}) as server:
        result = publish(run_cli, server, sweep.path)
    assert result.code == 1
    assert "Traceback" not in result.transcript
    failure_line, report = [
        failure_line for failure_line in result.out.splitlines() if "not uploaded" in failure_line
    ]
    assert failure_line.startswith("1/2 ")
    assert f"{sweep.path.name}  not uploaded: W&B report: " in report
    assert list(server.exit_codes.values()) == [0]
    assert_rows_are_those_of(complete_job, run_of(server, complete_job))


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (401, 2, "rejects the API key; run `wandb login`, or set WANDB_API_KEY"),
        (429, 1, "limits the request rate (HTTP 429); try again later"),
        pytest.param(500, 1, "failed (HTTP 500); try again later", marks=EXHAUSTIVE),
    ],
)
def test_publish_prints_one_line_if_the_server_rejects(
    fault: int, code: int, message: str, sweep: RunDir, run_cli: CliRunner, cli_env: dict[str, str]
) -> None:
    before = sweep.content
    with start_server(faults={"*": fault}) as server:
        result = publish(run_cli, server, sweep.path, env=SINGLE_RETRY)
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.transcript
    assert sweep.content == before
    assert KEY not in result.transcript
    assert_key_is_nowhere(run_cli.cwd, Path(cli_env["HOME"]))


def test_publish_skips_a_damaged_job(sweep: RunDir, run_cli: CliRunner) -> None:
    damaged_job, complete_job = sweep.jobs
    (damaged_job.path / "metrics.csv").write_bytes(b"step,train/loss\n1,a\xff\x00\n")
    with start_server() as server:
        result = publish(run_cli, server, sweep.path)
    assert result.code == 1
    assert "Traceback" not in result.transcript
    assert "1/2 " in result.out
    assert "not uploaded: " in result.out
    assert_rows_are_those_of(complete_job, run_of(server, complete_job))


def test_publish_skips_a_sweep_that_another_process_publishes(
    sweep: RunDir, run_cli: CliRunner
) -> None:
    before = sweep.content
    with start_server() as server, PathLock(sweep.path):
        result = publish(run_cli, server, sweep.path)
        assert not server.runs
    assert result.code == 1
    assert "skipped: another process publishes it" in result.out
    assert sweep.content == before
