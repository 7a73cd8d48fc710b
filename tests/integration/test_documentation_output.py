"""Output shown in the documentation equals the output of the commands; examples run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.cli_runner import UNTRACKED, CliRunner
from fixtures.documentation import ROOT, Block, blocks

CONSOLE_BLOCKS = [block for block in blocks() if block.language == "console"]
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="the extra jax is not installed"
)
EXAMPLES = [
    pytest.param(path, marks=needs_jax if path.stem.startswith("jax_") else (), id=path.stem)
    for path in sorted((ROOT / "docs" / "examples").glob("*.py"))
]
EXTEND = sorted((ROOT / "docs" / "extend").glob("[!i]*.md"))


@pytest.mark.parametrize("block", CONSOLE_BLOCKS, ids=lambda block: block.name)
def test_documented_output_equals_command_output(block: Block, run_cli: CliRunner) -> None:
    """``SCALEWISE_RECORD=1`` updates the output in the document."""
    (command,) = block.lines
    command_line = command.replace("scalewise", f"exec 2>&1; {sys.executable} -m scalewise", 1)
    result = run_cli.start_process(["bash", "-c", command_line]).wait()
    lines = [f"$ {command}", *(text.rstrip() for text in result.out.splitlines())]
    expected = "\n".join(lines) + "\n"
    if os.environ.get("SCALEWISE_RECORD"):
        text = block.document.read_text("utf-8")
        assert block.text in text
        block.document.write_text(text.replace(block.text, expected), "utf-8")
        return
    assert block.text == expected


@pytest.mark.parametrize("script", EXAMPLES)
def test_documented_example_runs(script: Path, run_cli: CliRunner) -> None:
    assert len(script.read_text("utf-8").splitlines()) < 40
    overrides = () if script.stem == "plan_only" else UNTRACKED[1:]
    result = run_cli.start_process([sys.executable, str(script), *overrides]).wait(280).assert_ok()
    assert result.out.count("\n") >= 1


@pytest.mark.parametrize("page", EXTEND, ids=lambda path: path.stem)
def test_extend_page_works_as_written(page: Path, run_cli: CliRunner) -> None:
    """Writes the files of the page and runs its commands in order."""
    folders = (run_cli.cwd, run_cli.cwd / "installed")
    paths = os.pathsep.join((*map(str, folders), run_cli.environment["PYTHONPATH"]))
    for block in blocks(page):
        if block.title:
            file = run_cli.cwd / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, "utf-8")
            continue
        for line in block.lines:
            if line == "pip install -e .":
                install(run_cli.cwd)
                continue
            command = line.replace("scalewise", f"{sys.executable} -m scalewise", 1)
            run_cli.start_process(
                ["bash", "-c", command], env={"PYTHONPATH": paths}
            ).wait().assert_ok()


def install(project: Path) -> None:
    """Install a project as documented, but into ``installed`` and without network."""
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", "installed", "-e", "."],
        cwd=project,
        check=True,
    )
