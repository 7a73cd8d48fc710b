"""``scalewise wandb-sweep`` with a local server and the ``wandb agent`` command."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures.cli_runner import TINY, CliResult, CliRunner
from fixtures.wandb_server import ENTITY
from fixtures.wandb_sweeps import SweepServer

KEY = "0123456789abcdef0123456789abcdef01234567"
SWEEP_OVERRIDES = ("-m", *TINY, "precision=fp32,bf16_mixed", "tracking.project=mine")


def server_environment(server: SweepServer) -> dict[str, str]:
    first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "PATH": first}


class TestSweepAgent:
    """Sweep over two options of a group, created and then run by the agent."""

    @pytest.fixture(scope="class")
    @classmethod
    def agent_sweep(
        cls, cli_runner_in: Callable[[str], CliRunner]
    ) -> tuple[SweepServer, CliResult, CliResult]:
        with SweepServer() as server:
            runner, env = cli_runner_in("agent"), server_environment(server)
            created = runner(*SWEEP_OVERRIDES, command="wandb-sweep", env=env).assert_ok()
            agent_command = created.out.splitlines()[-1].split()
            assert agent_command[:2] == ["wandb", "agent"]
            agent = runner.start_process(
                [sys.executable, "-m", "wandb", *agent_command[1:]], env
            ).wait(180)
            return server, created, agent

    def configs(self, server: SweepServer) -> dict[str, dict[str, Any]]:
        texts = {run: run_input["config"] for run, run_input in server.inputs.items()}
        config_by_run = {run: json.loads(text) for run, text in texts.items()}
        return {run: {k: v["value"] for k, v in c.items()} for run, c in config_by_run.items()}

    def test_wandb_sweep_prints_the_agent_command(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        server, created, _ = agent_sweep
        assert list(server.sweeps) == ["sweep0"]
        assert created.out == f"sweep {ENTITY}/mine/sweep0\nwandb agent {ENTITY}/mine/sweep0\n"
        assert server.sweeps["sweep0"]["name"] == "smoke"

    def test_agent_runs_succeed_and_join_the_sweep(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        server, _, agent = agent_sweep
        assert agent.code == 0, agent.failure_report
        assert sorted(server.inputs) == ["sweep0run1", "sweep0run2"]
        assert {run_input["sweep"] for run_input in server.inputs.values()} == {"sweep0"}
        assert server.exit_codes == dict.fromkeys(server.inputs, 0)
        assert [folder.status["status"] for folder in agent.folders] == ["ok", "ok"]
        assert {folder.status["wandb"]["id"] for folder in agent.folders} == set(server.inputs)

    def test_agent_value_of_a_group_selects_the_option(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        server, _, agent = agent_sweep
        precisions = [folder.resolved["choices"]["precision"] for folder in agent.folders]
        assert precisions == ["fp32", "bf16_mixed"]
        precision_values = {config["precision"] for config in self.configs(server).values()}
        assert precision_values == {"fp32", "bf16_mixed"}

    def test_agent_run_config_is_complete(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        server, _, agent = agent_sweep
        resolved = {folder.status["wandb"]["id"]: folder.resolved for folder in agent.folders}
        for run, config in self.configs(server).items():
            assert config["model"]["width"] == 32, run
            assert config["parts"]["precision"] == resolved[run]["precision"], run
            assert config["choices"]["precision"] == config["precision"], run

    def test_agent_run_sends_the_sweep_metric(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        server, _, agent = agent_sweep
        metric = server.sweeps["sweep0"]["metric"]["name"]
        for folder in agent.folders:
            summary = server.summary(folder.status["wandb"]["id"])
            assert summary[metric] == folder.summary["metrics"]["val/loss"], folder

    def test_agent_run_writes_the_api_key_nowhere(
        self, agent_sweep: tuple[SweepServer, CliResult, CliResult]
    ) -> None:
        _, created, agent = agent_sweep
        assert KEY not in created.transcript + agent.transcript
        texts = [text for folder in agent.folders for text in folder.content.values()]
        assert not any(KEY.encode() in text for text in texts)


def test_wandb_sweep_offline_writes_a_sweep_file(run_cli: CliRunner) -> None:
    overrides = ("sweep=search_learning_rate", *TINY, "hydra.sweeper.trials=7")
    result = run_cli(*overrides, command="wandb-sweep").assert_ok()
    config = yaml.safe_load(result.out)
    assert config["method"] == "bayes"
    assert config["run_cap"] == 7
    assert config["parameters"] == {
        "optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2}
    }
    assert re.search("omitted: pruner asha", result.err)
    assert not (run_cli.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("faults", "code", "message"),
    [
        ({"*": 500}, 1, "the server failed (HTTP 500)"),
        ({"*": 401}, 2, "rejects the API key"),
        (
            {"UpsertSweep": 403},
            1,
            "cannot create the W&B sweep: the server denies access (HTTP 403)",
        ),
    ],
    ids=["server", "key", "rights"],
)
def test_wandb_sweep_prints_one_line_if_the_server_rejects(
    run_cli: CliRunner, faults: dict[str, int], code: int, message: str
) -> None:
    with SweepServer() as server:
        server.faults.update(faults)
        result = run_cli(*SWEEP_OVERRIDES, command="wandb-sweep", env=server_environment(server))
    assert result.code == code, result.failure_report
    assert message in result.err
    assert "Traceback" not in result.transcript
    assert KEY not in result.transcript
