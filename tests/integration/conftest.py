"""Fixtures that run commands as subprocesses, and jobs from the process of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.cli_runner import CliRunner, cli_environment
from fixtures.job_runner import JobRunner


@pytest.fixture(scope="session")
def cli_env(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, str]:
    """Environment of every command: one cache of prepared data and an empty home directory."""
    return cli_environment(tmp_path_factory.mktemp("home"), shared_cache)


@pytest.fixture
def run_cli(tmp_path: Path, cli_env: dict[str, str]) -> Iterator[CliRunner]:
    """Function that runs commands in the temporary folder of the test."""
    runner = CliRunner(tmp_path, cli_env)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def cli_runner_in(
    tmp_path_factory: pytest.TempPathFactory, cli_env: dict[str, str]
) -> Iterator[Callable[[str], CliRunner]]:
    """Function that returns a runner in a named folder, for runs shared by tests of a module."""
    runners: list[CliRunner] = []

    def make_runner(name: str) -> CliRunner:
        runners.append(CliRunner(tmp_path_factory.mktemp(name), cli_env))
        return runners[-1]

    yield make_runner
    for runner in runners:
        runner.close()


@pytest.fixture
def run_job(tmp_path: Path, shared_cache: Path) -> JobRunner:
    """Function that runs jobs from the forkserver of this process: 1 s instead of 6 s."""
    return JobRunner(tmp_path, shared_cache)
