"""Modules in the current folder are imported only if ``trusted_packages`` names them."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from fixtures.cli_runner import SRC_DIR, TINY, UNTRACKED, CliResult, CliRunner
from fixtures.wandb_server import WandbServer
from fixtures.wandb_views import Views

MARKER = "imported"
TRAP_MODULE = """
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
raise ImportError(f"{{__file__}} was imported")
"""


def set_traps(folder: Path) -> Path:
    """Write a module for each importable top-level name; return the file to which they append."""
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}
    names |= {path.stem for path in SRC_DIR.iterdir()} | {"apex", "fixtures"}
    marker = folder / MARKER
    for name in filter(str.isidentifier, names):
        package = folder / name
        package.mkdir()
        (package / "__init__.py").write_text(TRAP_MODULE.format(marker=str(marker)))
    (folder / "hydra_plugins" / "planted.py").write_text(TRAP_MODULE.format(marker=str(marker)))
    return marker


class Trapped:
    """Runs commands in a folder with modules that must not be imported."""

    def __init__(self, runner: CliRunner) -> None:
        self.runner, self.marker = runner, set_traps(runner.cwd)
        self.temporary = runner.cwd.with_name(f"{runner.cwd.name}-tmp")
        self.temporary.mkdir()

    def __call__(self, command: str, *arguments: str, **environment: str) -> CliResult:
        overrides = [
            sys.executable,
            "-P",
            "-m",
            "scalewise",
            command,
            *arguments,
        ]  # as the script starts
        environment["TMPDIR"] = str(self.temporary)
        result = self.runner.start_process(overrides, environment).wait().assert_ok()
        imported_names = self.marker.read_text() if self.marker.exists() else ""
        assert imported_names == "", f"{command} imported {imported_names.split()}"
        assert "was imported" not in result.transcript
        # torch creates one cache folder per user in any run.
        inductor_cache = f"torchinductor_{getpass.getuser()}"
        remaining_files = sorted(
            path.name for path in self.temporary.iterdir() if path.name != inductor_cache
        )
        assert remaining_files == [], f"{command} left {remaining_files} among temporary files"
        return result


@pytest.fixture(scope="module")
def isolation_runner(cli_runner_in: Callable[[str], CliRunner]) -> Trapped:
    return Trapped(cli_runner_in("trapped"))


@pytest.fixture(scope="module")
def run(isolation_runner: Trapped) -> str:
    """Run of two ranks under a supervisor."""
    overrides = ("-m", *UNTRACKED, "hydra/launcher=packed", "parallelism=ddp", "seed=1")
    return str(isolation_runner("train", *overrides).folder.jobs[0].path)


def test_packed_sweep_imports_nothing_from_the_current_folder(run: str) -> None:
    assert Path(run, "status.json").is_file()


@pytest.mark.parametrize(
    "command", ["report", "export", pytest.param("evaluate", marks=pytest.mark.exhaustive)]
)
def test_run_commands_import_nothing_from_the_current_folder(
    command: str, isolation_runner: Trapped, run: str
) -> None:
    isolation_runner(command, run)


@pytest.mark.parametrize(
    "overrides",
    [
        ("plan", "experiment=smoke"),
        pytest.param(("train", *UNTRACKED), marks=pytest.mark.exhaustive),
        pytest.param(("train", *UNTRACKED, "parallelism=ddp"), marks=pytest.mark.exhaustive),
        pytest.param(("train", "-m", *UNTRACKED, "seed=1,2"), marks=pytest.mark.exhaustive),
        pytest.param(("doctor",), marks=pytest.mark.exhaustive),
    ],
)
def test_commands_import_nothing_from_the_current_folder(
    overrides: tuple[str, ...], isolation_runner: Trapped
) -> None:
    isolation_runner(*overrides)


@pytest.mark.exhaustive
def test_publish_imports_nothing_from_the_current_folder(isolation_runner: Trapped) -> None:
    folder = isolation_runner("train", *TINY, "name=published", WANDB_MODE="offline").newest
    with WandbServer(handlers=Views().handlers) as server:
        wandb_environment = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        isolation_runner("publish", str(folder.path), **wandb_environment)
        assert server.runs, "the run was sent"


def test_python_m_removes_the_current_folder_from_sys_path(run_cli: CliRunner) -> None:
    """Imports of ``python -m`` before the package starts are protected by Python's ``-P`` only."""
    for name in ("random", "torch", "yaml", "dataclasses", "typing"):
        (run_cli.cwd / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")
    run_cli("experiment=smoke", command="plan").assert_ok()
