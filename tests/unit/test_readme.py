"""The README says what is there, and its commands compose."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from scalewise.bench import readme_figures
from scalewise.bench.options import BenchOptions, split_options
from scalewise.commands.bench import BENCHMARKS, _as_overrides
from scalewise.commands.usage import EXAMPLES, VERBS
from scalewise.config import app, paths
from scalewise.config.diagnostics import diagnose_overrides
from scalewise.errors import ConfigError
from scalewise.launch import sweep_resume

README = Path(__file__).parents[2] / "README.md"


BLOCKS = re.compile(r"```sh\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(scalewise [a-z][^`]*)`")
COMMAND = re.compile(r"\bscalewise [a-z-]+\b.*")


def table() -> dict[str, list[str]]:
    """Returns the README's table of groups: group to options."""
    text = README.read_text(encoding="utf-8")
    rows = text.split("<!-- groups -->")[1].split("<!-- /groups -->")[0].strip().splitlines()
    cells = [row.strip("|").split("|") for row in rows]
    return {cell[0].strip().strip("`"): re.findall(r"`(\w+)`", cell[1]) for cell in cells}


def commands() -> list[str]:
    """Returns every command of the README and the examples of ``--help``."""
    text = README.read_text(encoding="utf-8")
    blocks = "\n".join(BLOCKS.findall(text)).replace("\\\n", " ")
    shown = [*COMMAND.findall(blocks), *(" ".join(line.split()) for line in INLINE.findall(text))]
    return list(dict.fromkeys([*shown, *(line for _, line in EXAMPLES)]))


def test_every_group_and_option_is_in_the_table() -> None:
    assert table() == {group: paths.option_names(group) for group in paths.GROUPS}


@pytest.mark.parametrize("line", commands())
def test_commands_compose(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("A book.\n")
    monkeypatch.chdir(tmp_path)
    app.prepare()
    _, verb, *words = shlex.split(line, comments=True)
    words = [word for word in words if word not in ("-m", "--cfg", "job", "...", "sweep=NAME")]
    if verb in ("bench", "calibrate"):
        name = BENCHMARKS[words.pop(0)] if verb == "bench" else verb
        benchmark = import_module(f"scalewise.bench.{name}")
        overrides = options_and_overrides(_as_overrides(words), benchmark.OPTIONS)
        runs = getattr(benchmark, "RUNS", {"": ()})
        assert diagnose_overrides([*next(iter(runs.values())), *overrides], here=False) == []
        return
    if verb in ("evaluate", "export"):
        known = import_module(f"scalewise.commands.{verb}").DEFAULTS
        assert {word.partition("=")[0] for word in words if "=" in word} <= {*known}
        return
    if verb not in ("train", "plan", "wandb-sweep") or words[:1] == ["explain"]:
        assert verb in VERBS
        assert not any("=" in word for word in words)
        return
    _, overrides = sweep_resume.parse_resume_request(words)
    if "-cd" in overrides:  # a folder of the user's
        return
    here = verb != "plan" and "hydra/launcher=slurm" not in words
    assert diagnose_overrides(overrides, here=here) == []


def options_and_overrides(words: list[str], options: type[BenchOptions]) -> list[str]:
    """Returns the overrides among a benchmark's words; all its options are known."""
    try:
        return split_options(words, options)[1]
    except ConfigError as error:  # of files that are not there
        if {complaint.key for complaint in error.complaints} <= {"data", "learn", "name"}:
            return []
        raise


def test_the_picture_is_there() -> None:
    picture = re.search(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert picture is not None
    assert (README.parent / picture[1]).is_file()


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text("utf-8"), "utf-8")
    readme_figures.update_readme(copy, README.parent / "experiments" / "records")
    assert copy.read_text("utf-8") == README.read_text("utf-8")
