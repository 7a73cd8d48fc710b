"""The README says what is there, and its commands compose."""

import re
import shlex
from pathlib import Path

import pytest

from scalewise.bench import figures
from scalewise.config import door, tree
from scalewise.config.refuse import diagnose
from scalewise.verbs.usage import EXAMPLES

README = Path(__file__).parents[2] / "README.md"


NO_RUN = {"...", "explain"}
"""Words of a line that composes no run."""


def table() -> dict[str, list[str]]:
    """Returns the README's table of groups: group to options."""
    text = README.read_text(encoding="utf-8")
    rows = text.split("<!-- groups -->")[1].split("<!-- /groups -->")[0].strip().splitlines()
    cells = [row.strip("|").split("|") for row in rows]
    return {cell[0].strip().strip("`"): re.findall(r"`(\w+)`", cell[1]) for cell in cells}


def commands() -> list[str]:
    """Returns every ``train`` and ``plan`` line of the README's code blocks and of ``--help``."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    verbs = ("scalewise train", "scalewise plan")
    shown = [line for line in lines if line.startswith(verbs) and not NO_RUN & {*line.split()}]
    return shown + [line for _, line in EXAMPLES]


def test_every_group_and_option_is_in_the_table() -> None:
    assert table() == {group: tree.names(group) for group in tree.GROUPS}


@pytest.mark.parametrize("line", commands())
def test_commands_compose(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("A book.\n")
    monkeypatch.chdir(tmp_path)
    door.prepare()
    _, verb, *words = shlex.split(line, comments=True)
    overrides = [word for word in words if word not in ("-m", "--cfg", "job")]
    here = verb != "plan" and "hydra/launcher=slurm" not in words
    assert diagnose(overrides, here=here) == []


def test_the_picture_is_there() -> None:
    picture = re.search(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert picture is not None
    assert (README.parent / picture[1]).is_file()


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text("utf-8"), "utf-8")
    figures.renew(copy, README.parent / "experiments" / "records")
    assert copy.read_text("utf-8") == README.read_text("utf-8")
