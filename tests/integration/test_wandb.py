"""The W&B client with a server that works, fails, disappears or is absent."""

from __future__ import annotations

import json
import os
import pty
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.cli_runner import MARK_VARIABLE, TINY, CliResult, CliRunner, RunDir
from fixtures.wandb_server import ENTITY, WandbServer
from fixtures.wandb_views import Views

EXHAUSTIVE = pytest.mark.exhaustive
KEY = "0123456789abcdef0123456789abcdef01234567"
LONGER_RUN = ("trainer.max_steps=400", "trainer.log_every=1", "trainer.validate_every=null")


def server_environment(server: WandbServer) -> dict[str, str]:
    return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}


def assert_nothing_lost(run: RunDir, steps: int) -> None:
    assert run.status["status"] == "ok"
    assert run.steps == list(range(1, steps + 1))
    assert run.summary["steps"] == steps
    assert run.checkpoints[-1] == steps


def assert_key_is_nowhere(result: CliResult) -> None:
    assert KEY not in result.transcript
    leaks = [
        str(path)
        for run in result.folders
        for path, text in run.content.items()
        if KEY.encode() in text
    ]
    assert leaks == []


class TestOnline:
    """Online sweep of two jobs, with a run name in the environment."""

    @pytest.fixture(scope="class")
    @classmethod
    def online_sweep(
        cls, cli_runner_in: Callable[[str], CliRunner]
    ) -> tuple[WandbServer, CliResult]:
        with WandbServer(handlers=Views().handlers) as server:
            overrides = ("-m", *TINY, "seed=1,2", "tracking.tags=[mine]", "tracking.notes=noted")
            run_variables = {"WANDB_RUN_ID": "job4711", "WANDB_NAME": "nightly"}
            run_variables["WANDB_RESUME"] = "allow"
            env = {**server_environment(server), **run_variables}
            return server, cli_runner_in("online")(*overrides, env=env).assert_ok()

    def test_online_jobs_are_runs_of_one_group(
        self, online_sweep: tuple[WandbServer, CliResult]
    ) -> None:
        server, result = online_sweep
        assert len(server.inputs) == 2
        assert "job4711" not in server.inputs
        sweep = result.folder.path
        for run_input in server.inputs.values():
            assert run_input["groupName"] == f"{sweep.parent.name}/{sweep.name}", run_input
            assert run_input["jobType"] == "train", run_input
            assert run_input["displayName"] == "decoder_nano-single-fp32-adamw-lr3e-3", run_input
            assert {"mine", "decoder_nano", "smoke"} <= set(run_input["tags"]), run_input
            assert run_input["notes"] == "noted", run_input

    def test_online_config_is_nested(self, online_sweep: tuple[WandbServer, CliResult]) -> None:
        server, result = online_sweep
        configs = [json.loads(run_input["config"]) for run_input in server.inputs.values()]
        assert sorted(config["seed"]["value"] for config in configs) == [1, 2]
        for config in configs:
            assert config["model"]["value"]["width"] == 32, config
            assert config["git_commit"]["value"] == result.folder.jobs[0].status["git_commit"], (
                config
            )

    def test_online_history_and_exit_codes_arrive(
        self, online_sweep: tuple[WandbServer, CliResult]
    ) -> None:
        server, _ = online_sweep
        for run in server.inputs:
            rows = server.history(run)
            assert [row["step"] for row in rows] == [4, 8], run
            assert "val/loss" in rows[-1], run
        assert set(server.exit_codes.values()) == {0}

    def test_status_links_the_wandb_run(self, online_sweep: tuple[WandbServer, CliResult]) -> None:
        server, result = online_sweep
        links = [job.status["wandb"] for job in result.folder.jobs]
        assert {link["mode"] for link in links} == {"online"}
        assert {link["id"] for link in links} == set(server.inputs)
        for link in links:
            assert link["url"].startswith(f"{server.url}/{ENTITY}/scalewise/runs/"), link

    def test_sweep_end_prints_one_report_link(
        self, online_sweep: tuple[WandbServer, CliResult]
    ) -> None:
        server, result = online_sweep
        assert result.out.count("W&B report") == 1
        assert result.folder.json("sweep.json")["wandb"]["report"] in result.out
        assert server.alerts == []
        assert server.unexpected == []
        for job in result.folder.jobs:
            run = server.runs[job.status["wandb"]["id"]]
            assert run.summary["status"] == "ok", job
            assert {"report.html", "status.json", "resolved.yaml"} <= set(run.files), job
            assert "report" not in job.status["wandb"], job

    def test_online_run_writes_the_api_key_nowhere(
        self, online_sweep: tuple[WandbServer, CliResult]
    ) -> None:
        assert_key_is_nowhere(online_sweep[1])


def test_failed_run_is_failed_on_the_server(run_cli: CliRunner) -> None:
    with WandbServer(handlers=Views().handlers) as server:
        result = run_cli(*TINY, "+inject=raise", env=server_environment(server))
    assert result.code == 1
    assert list(server.exit_codes.values()) == [1]
    (alert,) = server.alerts
    assert alert["title"] == "failed: decoder_nano-single-fp32-adamw-lr3e-3"
    assert "injected: this job raises on purpose" in alert["text"]
    assert_key_is_nowhere(result)


@pytest.mark.parametrize("fault", [500, *(pytest.param(n, marks=EXHAUSTIVE) for n in (401, 429))])
def test_broken_server_delays_seconds_and_switches_offline(fault: int, run_cli: CliRunner) -> None:
    with WandbServer(faults={"*": fault}) as server:
        result = run_cli(*TINY, env=server_environment(server)).assert_ok()
    assert result.seconds < 60
    assert_nothing_lost(result.folder, 8)
    assert result.folder.status["wandb"]["mode"] == "offline"
    assert "W&B online mode is unavailable" in result.out
    assert_key_is_nowhere(result)


@pytest.mark.parametrize("server_fault", ["dies", pytest.param("breaks", marks=EXHAUSTIVE)])
def test_lost_server_does_not_stop_training(server_fault: str, run_cli: CliRunner) -> None:
    with WandbServer() as server:
        process = run_cli.start(*TINY, *LONGER_RUN, env=server_environment(server))
        process.wait_for_step(5)
        if server_fault == "dies":
            server.shut_down()
        else:
            server.faults["*"] = 500
        result = process.wait(90).assert_ok()
        assert_nothing_lost(result.folder, 400)
        assert result.folder.status["seconds"] < 70
        assert result.folder.status["wandb"]["mode"] == "online"
    assert process.remaining_processes() == []
    with WandbServer(handlers=Views().handlers) as second_server:
        path = str(result.folder.path)
        run_cli(path, command="publish", env=server_environment(second_server)).assert_ok()
        (run,) = second_server.runs.values()
    assert [row["step"] for row in run.history] == list(range(1, 401))
    assert [row["train/loss"] for row in run.history] == result.folder.column("train/loss")


@pytest.mark.parametrize(
    "url", [pytest.param("http://127.0.0.1:9", marks=EXHAUSTIVE), "http://nowhere.invalid"]
)
def test_key_without_server_tracks_offline(url: str, run_cli: CliRunner) -> None:
    result = run_cli(*TINY, env={"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}).assert_ok()
    assert result.folder.status["wandb"]["mode"] == "offline"
    assert_key_is_nowhere(result)


@pytest.mark.parametrize(
    ("tracking_overrides", "variable"),
    [((), "disabled"), pytest.param(("tracking=none",), "offline", marks=EXHAUSTIVE)],
)
def test_untracked_run_records_disabled_tracking(
    tracking_overrides: tuple[str, ...], variable: str, run_cli: CliRunner
) -> None:
    folder = run_cli(*TINY, *tracking_overrides, env={"WANDB_MODE": variable}).assert_ok().folder
    assert folder.status["wandb"]["mode"] == "disabled"
    assert not (folder.path / "wandb").exists()


def test_missing_key_prompts_nothing_on_a_terminal(run_cli: CliRunner) -> None:
    text, code = run_at_terminal(run_cli, *TINY)
    assert code == 0, text
    assert "Enter your choice" not in text
    assert "wandb.ai" not in text
    assert "8/8" in text
    (status,) = run_cli.cwd.glob("runs/*/*/status.json")
    assert json.loads(status.read_text())["wandb"]["mode"] == "offline"
    assert text.count("\x1b[?25l") <= text.count("\x1b[?25h"), "the cursor stays hidden"


def test_failed_tracker_restores_the_terminal(run_cli: CliRunner) -> None:
    text, code = run_at_terminal(run_cli, *TINY, "+inject=raise")
    assert code == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def run_at_terminal(runner: CliRunner, *arguments: str) -> tuple[str, int]:
    """Run a command on a pseudo terminal without input."""
    environment: dict[str, Any] = {**runner.environment, MARK_VARIABLE: "terminal", "TERM": "xterm"}
    overrides = [sys.executable, "-m", "scalewise", "train", *arguments]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(runner.cwd)
        os.execvpe(overrides[0], overrides, environment)
    content, deadline = b"", time.monotonic() + 60
    os.set_blocking(terminal, False)
    while True:
        assert time.monotonic() < deadline, f"waits for an answer? {content.decode()}"
        try:
            chunk = os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.05)
            continue
        except OSError:  # the terminal is closed
            break
        content += chunk
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    return content.decode(), os.waitstatus_to_exitcode(status)
