"""Runs whose input files are on a server of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner, same_weights
from fixtures.http_files import serve_folder
from fixtures.job_runner import JobRunner

from scalewise.errors import ConfigError

TINY = (*(it for it in UNTRACKED if "data." not in it), "launch.isolation=process")
TEXT = ("data=text", "data.field=text", "data.vocabulary=300", "data.sequence=32")


def records(word: str) -> str:
    return "".join(f'{{"text": "{word} number {it} of many"}}\n' for it in range(2000))


def test_run_on_remote_files_equals_one_on_local_files(tmp_path: Path, run_job: JobRunner) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "a.jsonl").write_text(records("line"))
    train = run_job.without_defaults
    overrides = (*TINY, *TEXT, "model.vocabulary=300", "parallelism=ddp", "checkpoint.every=4")
    local = train(*overrides, f"data.paths=[{served / 'a.jsonl'}]")
    with serve_folder(served) as server:
        remote_path = f"data.paths=['{server.url}/*.jsonl']"
        remote = train(*overrides, remote_path)
        assert [it for it in server.requested if it.endswith("jsonl")] == ["/a.jsonl"]
        resumed = train(*overrides, remote_path, resume=remote.checkpoint(4))
        assert [it for it in server.requested if it.endswith("jsonl")] == ["/a.jsonl"]
        (served / "a.jsonl").write_text(records("other"))
        with pytest.raises(ConfigError, match="have changed since the checkpoint"):
            train(*overrides, remote_path, resume=remote.checkpoint(4))
    assert same_weights(remote.weights(), local.weights())
    assert same_weights(resumed.weights(), local.weights())


def test_plan_uses_no_network(run_cli: CliRunner, tmp_path: Path) -> None:
    with serve_folder(tmp_path) as server:
        paths = f"data.paths=['{server.url}/*.jsonl']"
        run_cli(*TINY, *TEXT, paths, command="plan").assert_ok()
        assert server.requested == []
