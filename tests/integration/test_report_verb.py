"""``scalewise report``: both renderings of finished folders, whatever ails W&B's packages."""

from __future__ import annotations

from pathlib import Path

from fixtures.doors import Doors
from fixtures.reports import LAYOUTS, layout_job, make_run, make_sweep

PAGE, SPEC = "report.html", "report_spec.json"


def test_writes_what_the_service_will_have_runs_of(scalewise: Doors) -> None:
    make_sweep(scalewise.cwd / "tracked", LAYOUTS, layout_job)
    make_run(scalewise.cwd / "own", steps=9, wandb={"mode": "disabled", "url": None})
    ended = scalewise("tracked", "own", verb="report").ok()
    assert ended.out.splitlines() == [f"tracked/{PAGE}", f"own/{PAGE}"]
    assert ended.err == ""
    assert written(scalewise.cwd / "tracked") == {PAGE, SPEC}
    assert written(scalewise.cwd / "own") == {PAGE}


def test_a_broken_package_of_the_service_costs_a_line(scalewise: Doors) -> None:
    make_run(scalewise.cwd / "run", steps=9)
    package = scalewise.cwd / "broken" / "wandb_workspaces"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('half installed')\n", "utf-8")
    env = {"PYTHONPATH": f"{package.parent}:{scalewise.environment['PYTHONPATH']}"}
    ended = scalewise("run", verb="report", env=env).ok()
    assert f"cannot write {SPEC}: ImportError: half installed" in ended.out
    assert written(scalewise.cwd / "run") == {PAGE}


def test_refuses_what_is_no_folder_all_at_once(scalewise: Doors) -> None:
    ended = scalewise("none", "nor", verb="report").refused(
        "none is not a folder", "nor is not a folder"
    )
    assert ended.out == ""


def test_says_what_holds_no_run(scalewise: Doors) -> None:
    (scalewise.cwd / "empty").mkdir()
    scalewise("empty", verb="report").refused("neither a run")


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("report")}
