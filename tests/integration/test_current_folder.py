"""Modules in the current folder: none is imported unless ``trusted_packages`` names it."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from fixtures.doors import SOURCE, TINY, UNTRACKED, Doors, Ended
from fixtures.wandb_server import WandbServer
from fixtures.wandb_views import Views

MARKER = "imported"
TRAP = """
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
raise ImportError(f"{{__file__}} was imported")
"""


def set_traps(folder: Path) -> Path:
    """Writes a module for each importable top-level name; returns the file that they append to."""
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}
    names |= {path.stem for path in SOURCE.iterdir()} | {"apex", "fixtures"}
    marker = folder / MARKER
    for name in filter(str.isidentifier, names):
        package = folder / name
        package.mkdir()
        (package / "__init__.py").write_text(TRAP.format(marker=str(marker)))
    (folder / "hydra_plugins" / "planted.py").write_text(TRAP.format(marker=str(marker)))
    return marker


class Trapped:
    """Runs commands in a folder full of modules that must not be imported."""

    def __init__(self, doors: Doors) -> None:
        self.doors, self.marker = doors, set_traps(doors.cwd)
        self.temporary = doors.cwd.with_name(f"{doors.cwd.name}-tmp")
        self.temporary.mkdir()

    def __call__(self, verb: str, *arguments: str, **environment: str) -> Ended:
        line = [sys.executable, "-P", "-m", "scalewise", verb, *arguments]  # as the script starts
        environment["TMPDIR"] = str(self.temporary)
        ended = self.doors.command(line, environment).wait().ok()
        imported = self.marker.read_text() if self.marker.exists() else ""
        assert imported == "", f"{verb} imported {imported.split()}"
        assert "was imported" not in ended.said
        # torch makes one cache folder a user, whatever is run.
        kept = f"torchinductor_{getpass.getuser()}"
        left = sorted(path.name for path in self.temporary.iterdir() if path.name != kept)
        assert left == [], f"{verb} left {left} among temporary files"
        return ended


@pytest.fixture(scope="module")
def trapped(doors_in: Callable[[str], Doors]) -> Trapped:
    return Trapped(doors_in("trapped"))


@pytest.fixture(scope="module")
def run(trapped: Trapped) -> str:
    """A run of two ranks under a supervisor."""
    line = ("-m", *UNTRACKED, "hydra/launcher=packed", "parallelism=ddp", "seed=1")
    return str(trapped("train", *line).folder.jobs[0].path)


def test_packed_sweep_of_two_ranks_imports_nothing_from_the_folder(run: str) -> None:
    assert Path(run, "status.json").is_file()


@pytest.mark.parametrize(
    "verb", ["report", "export", pytest.param("evaluate", marks=pytest.mark.exhaustive)]
)
def test_commands_on_a_run_import_nothing_from_the_folder(
    verb: str, trapped: Trapped, run: str
) -> None:
    trapped(verb, run)


@pytest.mark.parametrize(
    "line",
    [
        ("plan", "experiment=smoke"),
        pytest.param(("train", *UNTRACKED), marks=pytest.mark.exhaustive),
        pytest.param(("train", *UNTRACKED, "parallelism=ddp"), marks=pytest.mark.exhaustive),
        pytest.param(("train", "-m", *UNTRACKED, "seed=1,2"), marks=pytest.mark.exhaustive),
        pytest.param(("doctor",), marks=pytest.mark.exhaustive),
    ],
)
def test_commands_import_nothing_from_the_folder(line: tuple[str, ...], trapped: Trapped) -> None:
    trapped(*line)


@pytest.mark.exhaustive
def test_publish_imports_nothing_from_the_folder(trapped: Trapped) -> None:
    folder = trapped("train", *TINY, "name=published", WANDB_MODE="offline").newest
    with WandbServer(handlers=Views().handlers) as server:
        known = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        trapped("publish", str(folder.path), **known)
        assert server.runs, "the run was sent"


def test_python_m_drops_the_folder_from_the_path(scalewise: Doors) -> None:
    """What ``python -m`` itself imports before the package is Python's own to protect (-P)."""
    for name in ("random", "torch", "yaml", "dataclasses", "typing"):
        (scalewise.cwd / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")
    scalewise("experiment=smoke", verb="plan").ok()
