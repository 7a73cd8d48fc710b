"""W&B servers that hang or send endless responses delay a run by a few seconds at most."""

from __future__ import annotations

import json

import pytest
from fixtures.cli_runner import TINY, CliRunner
from fixtures.wandb_server import WandbServer
from fixtures.wandb_views import Views

KEY = "0123456789abcdef0123456789abcdef01234567"
LONGER_RUN = ("trainer.max_steps=12", "trainer.log_every=1", "trainer.validate_every=null")
SLOW_STEPS = ("+callbacks.slow._target_=fixtures.faults.SlowSteps", "trusted_packages=[fixtures]")
STARTUP_S = 20.0
"""Seconds for the imports of a command on a busy machine."""


def _break(server: WandbServer, fault: str) -> None:
    server.delay = 600.0 if fault == "hangs" else 0.0
    server.streams_garbage = fault == "streams garbage"


@pytest.mark.parametrize(
    "fault", ["hangs", pytest.param("streams garbage", marks=pytest.mark.exhaustive)]
)
def test_unresponsive_server_delays_at_most_five_seconds(fault: str, run_cli: CliRunner) -> None:
    with WandbServer(handlers=Views().handlers) as server:
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        process = run_cli.start(*TINY, *LONGER_RUN, *SLOW_STEPS, env=env)
        process.wait_for_step(3)
        _break(server, fault)
        result = process.wait().assert_ok()
        status = result.folder.status
        assert status["wandb"]["mode"] == "online"
        summary = result.folder.path / "summary.json"
        shutdown_s = (result.folder.path / "status.json").stat().st_mtime - summary.stat().st_mtime
        assert shutdown_s < 7, "finishing at the server that does not answer"
        assert process.remaining_processes() == []

        published = run_cli(str(result.folder.path), command="publish", env=env)
        assert published.code == 1, published.failure_report
        assert "does not respond; try again later" in published.transcript
        assert "Traceback" not in published.transcript
        assert published.seconds < 5 + STARTUP_S

        _break(server, "")
        run_cli(str(result.folder.path), command="publish", env=env).assert_ok()
        (run,) = server.runs.values()
    assert [row["step"] for row in run.history] == list(range(1, 13))
    assert json.loads((result.folder.path / "wandb/published.json").read_text())["path"]
