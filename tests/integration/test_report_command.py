"""``scalewise report``: HTML and W&B reports of finished folders."""

from __future__ import annotations

from pathlib import Path

from fixtures.cli_runner import CliRunner
from fixtures.run_folders import STRATEGY_GRID, make_run, make_sweep, strategy_job

PAGE, SPEC = "report.html", "report_spec.json"


def test_report_links_runs_that_wandb_has(run_cli: CliRunner) -> None:
    make_sweep(run_cli.cwd / "tracked", STRATEGY_GRID, strategy_job)
    make_run(run_cli.cwd / "own", steps=9, wandb={"mode": "disabled", "url": None})
    result = run_cli("tracked", "own", command="report").assert_ok()
    assert result.out.splitlines() == [f"tracked/{PAGE}", f"own/{PAGE}"]
    assert result.err == ""
    assert report_files(run_cli.cwd / "tracked") == {PAGE, SPEC}
    assert report_files(run_cli.cwd / "own") == {PAGE}


def test_report_prints_one_line_for_a_broken_wandb_package(run_cli: CliRunner) -> None:
    make_run(run_cli.cwd / "run", steps=9)
    package = run_cli.cwd / "broken" / "wandb_workspaces"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('half installed')\n", "utf-8")
    env = {"PYTHONPATH": f"{package.parent}:{run_cli.environment['PYTHONPATH']}"}
    result = run_cli("run", command="report", env=env).assert_ok()
    assert f"cannot write {SPEC}: ImportError: half installed" in result.out
    assert report_files(run_cli.cwd / "run") == {PAGE}


def test_report_rejects_all_invalid_folders_at_once(run_cli: CliRunner) -> None:
    result = run_cli("none", "nor", command="report").assert_rejected(
        "none is not a folder", "nor is not a folder"
    )
    assert result.out == ""


def test_report_names_folders_without_runs(run_cli: CliRunner) -> None:
    (run_cli.cwd / "empty").mkdir()
    run_cli("empty", command="report").assert_rejected("neither a run")


def report_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("report")}
