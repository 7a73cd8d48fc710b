"""``scalewise publish`` of single runs: after faults of the server, of attempts, by environment."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import pytest
from fixtures.cli_runner import TINY, CliRunner, RunDir
from fixtures.wandb_http import STREAM, UPLOAD
from fixtures.wandb_publish import (
    SINGLE_RETRY,
    assert_rows_are_those_of,
    publish,
    run_of,
    server_environment,
    start_server,
    write_operations,
)

EXHAUSTIVE = pytest.mark.exhaustive
LONGER_RUN = ("trainer.log_every=4", "trainer.validate_every=null")


@pytest.mark.exhaustive
def test_publish_groups_two_attempts(run_cli: CliRunner) -> None:
    """Each attempt has its own id and rows; the second names its checkpoint."""
    run_cli(*TINY).assert_ok()
    run_cli(*TINY, "trainer.max_steps=12", "resume=last").assert_ok()
    first, second_folder = run_cli.folders
    with start_server() as server:
        publish(run_cli, server, second_folder.path, first.path).assert_ok()
        publish(run_cli, server, first.path, second_folder.path).assert_ok()
    first_run, second_run = run_of(server, first), run_of(server, second_folder)
    assert first_run is not second_run
    assert first_run.input["groupName"] == second_run.input["groupName"]
    assert first_run.input["groupName"] == f"{first.path.parent.name}/{first.path.name}"
    assert_rows_are_those_of(first, first_run)
    assert_rows_are_those_of(second_folder, second_run, after=8)
    assert second_run.config["resumed_from"] == str(first.checkpoint(8))
    (source,) = [artifact for artifact in server.artifacts if artifact.run == first_run.name]
    assert source.used_by in ([], [second_run.name])  # the first was published after the second


@EXHAUSTIVE
def test_publish_completes_a_run_after_a_server_failure(run_cli: CliRunner) -> None:
    """Rows on the server are not sent again."""
    with start_server(fail_after_rows=1) as server:
        rare_logging = ("trainer.log_every=20", "trainer.validate_every=null")
        overrides = (*TINY, *rare_logging, "trainer.max_steps=20000")
        process = run_cli.start(*overrides, env={**server_environment(server), **SINGLE_RETRY})
        process.wait_until(lambda: STREAM in server.faults, "a row", 90)
        (run,) = server.runs.values()
        last_step = run.history[-1]["step"]
        folder = RunDir(process.wait_for_step(last_step + 40))
        process.signal(SIGTERM)
        assert "try again later" in process.wait(120).out
        assert run.history[-1]["step"] == last_step
        assert folder.steps == list(range(1, folder.steps[-1] + 1))
        server.fail_after_rows = None
        server.faults.clear()
        publish(run_cli, server, folder.path).assert_ok()
        assert_rows_are_those_of(folder, run)
        assert run.summary["status"] == "interrupted"


def test_publish_marks_a_killed_run_as_failed(run_cli: CliRunner) -> None:
    with start_server() as server:
        overrides = (*TINY, *LONGER_RUN, "trainer.max_steps=20000")
        process = run_cli.start(*overrides, env=server_environment(server))
        folder = RunDir(process.wait_for_step(20))
        upload = publish(run_cli, server, folder.path)
        assert upload.code == 1
        assert "the run is in progress; publish it when it has ended" in upload.out
        assert write_operations(server) <= {STREAM, "UpsertBucket", "CreateRunFiles", UPLOAD}
        process.kill()
        process.wait()
        publish(run_cli, server, folder.path).assert_ok()
        (run,) = server.runs.values()
    assert run.state == "failed"
    assert run.summary["status"] == "failed"
    assert "the process is gone" in run.summary["reason"]
    assert_rows_are_those_of(folder, run)
    assert [alert["title"][:6] for alert in server.alerts] == ["failed"]


@pytest.mark.exhaustive
def test_slow_server_loses_no_step_and_no_history_row(run_cli: CliRunner) -> None:
    with start_server(delay=0.2) as server:
        result = run_cli(*TINY, "parallelism=ddp", env=server_environment(server)).assert_ok()
    folder = result.folder
    assert len(server.runs) == 1
    assert result.out.count("W&B report") == 1, "of two ranks one speaks"
    assert folder.steps == list(range(1, 9))
    assert folder.status["wandb"]["mode"] == "online"
    assert_rows_are_those_of(folder, run_of(server, folder))


@pytest.mark.exhaustive
def test_publish_uses_wandb_environment_variables(run_cli: CliRunner) -> None:
    other_folder = run_cli.cwd / "elsewhere"
    other_folder.mkdir()
    names = {"PROJECT": "own", "ENTITY": "team", "RUN_GROUP": "together", "NAME": "named"}
    more = {"NOTES": "noted", "TAGS": "a,b", "JOB_TYPE": "trial", "DIR": str(other_folder)}
    env = {f"WANDB_{name}": value for name, value in {**names, **more}.items()}
    with start_server() as server:
        run_cli(
            *TINY, env={**env, **server_environment(server), "WANDB_MODE": "offline"}
        ).assert_ok()
        assert server.requests == []
        result = publish(run_cli, server, run_cli.folders[0].path, env=env)
    folder, (run,) = result.assert_ok().folder, server.runs.values()
    assert {a["project"] for a in [run.input]} == {"own"}
    assert run.input["entity"] == "team"
    assert run.input["groupName"] == "together"
    assert run.input["displayName"] == "named"
    assert run.input["notes"] == "noted"
    assert run.input["jobType"] == "trial"
    assert set(run.input["tags"]) >= {"a", "b", "smoke"}
    assert [path.name for path in other_folder.glob("wandb/offline-run-*")] == [
        Path(folder.status["wandb"]["folder"]).name
    ]
    assert_rows_are_those_of(folder, run)
