"""README and docs name existing options, and their commands compose."""

import os
import re
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from fixtures.documentation import COMMAND, DOCUMENTS, FENCE, ROOT, Block, blocks

from scalewise.bench import record
from scalewise.bench.options import BenchOptions, split_options
from scalewise.commands import explain
from scalewise.commands.bench import BENCHMARKS, _as_overrides
from scalewise.commands.usage import COMMANDS, EXAMPLES
from scalewise.config import app, paths
from scalewise.config.compose import compose
from scalewise.config.diagnostics import diagnose_overrides
from scalewise.config.option_docs import group_summaries
from scalewise.errors import ConfigError
from scalewise.interop.translation import LIBRARIES
from scalewise.launch import sweep_resume
from scalewise.planner.plan import plan_record

README = ROOT / "README.md"
INLINE_MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
INLINE_COMMAND = re.compile(r"`(scalewise [a-z][^`]*)`")
OTHER_COMMANDS = {
    "make": lambda line: re.search(rf"^{line.split()[1]}:", MAKEFILE, re.MULTILINE) is not None,
    "source": lambda line: line == "source .venv/bin/activate",
    "pip": lambda line: line == "pip install -e .",  # run by an integration test
}
"""Checks of lines that call no subcommand of scalewise, by first word."""
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def table() -> dict[str, tuple[list[str], str]]:
    """Config group table of the README: options and description by group."""
    text = README.read_text(encoding="utf-8")
    rows = text.split("<!-- groups -->")[1].split("<!-- /groups -->")[0].strip().splitlines()
    cells = [row.strip("|").split("|") for row in rows]
    return {
        group.strip().strip("`"): (re.findall(r"`(\w+)`", options), description.strip())
        for group, options, description in cells
    }


def commands() -> list[str]:
    """Commands in README, CONTRIBUTING and docs, and the examples of ``--help``."""
    documented_commands = [
        command
        for block in blocks()
        if block.language == "sh" and not block.reason
        for line in block.lines
        for command in COMMAND.findall(line)
    ]
    for document in DOCUMENTS:
        text = FENCE.sub("", document.read_text("utf-8"))
        documented_commands += [" ".join(line.split()) for line in INLINE_COMMAND.findall(text)]
    return list(dict.fromkeys([*documented_commands, *(line for _, line in EXAMPLES)]))


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.name)
def test_documentation_blocks_are_tested_or_give_a_reason(block: Block) -> None:
    """Commands compose in this file; console output and docs/extend are tested in integration."""
    if block.reason or block.language in ("console", "text"):
        return
    if block.language == "sh":
        for line in block.lines:
            is_command = COMMAND.search(line) or line.split("#")[0].strip() == "scalewise"
            check_command = OTHER_COMMANDS.get(line.split()[0])
            assert is_command or (check_command and check_command(line.split("#")[0].strip())), line
        return
    if block.title and block.document == README:  # GitHub does not include files
        assert block.text == (ROOT / block.title).read_text("utf-8")
        return
    is_included_file = block.text.startswith('--8<-- "docs/examples/')
    is_extension_file = block.title and block.document.parent.name == "extend"
    assert is_included_file or is_extension_file, "say why it is not tested"


def test_documentation_table_has_every_group_and_option() -> None:
    described = group_summaries()
    assert table() == {
        group: (paths.option_names(group), described[group]) for group in paths.GROUPS
    }


@pytest.mark.parametrize("line", commands())
def test_documented_commands_compose(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("A book.\n")
    monkeypatch.chdir(tmp_path)
    app.prepare()
    _, command, *words = shlex.split(line, comments=True)
    words = [word for word in words if word not in ("-m", "--cfg", "job", "...", "sweep=NAME")]
    if command in ("bench", "calibrate"):
        name = BENCHMARKS[words.pop(0)] if command == "bench" else command
        benchmark = import_module(f"scalewise.bench.{name}")
        overrides = options_and_overrides(_as_overrides(words), benchmark.OPTIONS)
        runs = getattr(benchmark, "RUNS", {"": ()})
        assert (
            diagnose_overrides([*next(iter(runs.values())), *overrides], check_machine=False) == []
        )
        return
    composes = command in ("train", "plan", "verify", "wandb-sweep")
    if command == "export" and words[:1] and words[0] in LIBRARIES:
        composes = bool(words.pop(0))
    elif command in ("evaluate", "export"):
        defaults = import_module(f"scalewise.commands.{command}").DEFAULTS
        assert {word.partition("=")[0] for word in words if "=" in word} <= {*defaults}
        return
    if command == "explain":
        assert all(map(explain.explain_lines, words))
        return
    if not composes or words[:1] == ["explain"]:
        assert command in COMMANDS
        assert not any("=" in word for word in words)
        return
    _, overrides = sweep_resume.parse_resume_request(words)
    if "-cd" in overrides:  # a user-defined folder
        return
    check_machine = command in ("train", "wandb-sweep") and "hydra/launcher=slurm" not in words
    assert diagnose_overrides(overrides, check_machine=check_machine) == []


def options_and_overrides(words: list[str], options: type[BenchOptions]) -> list[str]:
    """Overrides among the arguments of a benchmark; asserts that its options exist."""
    try:
        return split_options(words, options)[1]
    except ConfigError as error:  # of files that do not exist
        if {issue.key for issue in error.issues} <= {"data", "learn", "name"}:
            return []
        raise


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_modules_exist(document: Path) -> None:
    modules = INLINE_MODULE.findall(FENCE.sub("", document.read_text("utf-8")))
    folders = [ROOT, ROOT / "src/scalewise"]
    missing = [name for name in modules if not any((it / name).is_file() for it in folders)]
    assert not missing


def test_readme_picture_exists() -> None:
    picture_match = re.search(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert picture_match is not None
    assert (README.parent / picture_match[1]).is_file()


def test_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_figures_equal_the_records(document: Path, tmp_path: Path) -> None:
    """``SCALEWISE_RECORD=1`` updates the figures in the document."""
    copy = document if os.environ.get("SCALEWISE_RECORD") else tmp_path / "copy.md"
    copy.write_text(document.read_text("utf-8"), "utf-8")
    record.update_figures(
        copy, ROOT / "experiments" / "records", partial(compose, check_machine=False)
    )
    assert copy.read_text("utf-8") == document.read_text("utf-8")


@pytest.mark.parametrize("name", [*record.PARAGRAPHS, "gpu_accuracy"])
def test_recorded_figures_are_all_quoted(name: str) -> None:
    quoted = [
        document
        for document in record.documents(ROOT)
        if f"<!-- {name} -->\n" in document.read_text("utf-8")
    ]
    assert quoted


def test_documented_activation_formula_equals_the_plan() -> None:
    """Compares figures in docs/predict.md with the eager plan of its first command."""
    page = (ROOT / "docs" / "predict.md").read_text("utf-8")
    first = next(line for block in blocks(ROOT / "docs" / "predict.md") for line in block.lines)
    run = compose([*shlex.split(first)[2:], "compile=none"], check_machine=False)
    model, tokens = run.model, run.sequences_per_forward * run.data.sequence
    w, k, h, f = model.width, model.kv_width, model.heads, model.feedforward
    token_bytes = 2 * (6 * w + 2 * k + 4 * f) + 4 * h + 8
    entries = plan_record(run)["ledger"]
    assert entries["activations of blocks"] == model.layers * tokens * token_bytes
    assert (
        f"{token_bytes:,} bytes per token: {tokens * token_bytes:,} bytes for {tokens} tokens"
        in page
    )


def test_makefile_python_imports_existing_names() -> None:
    imports = re.findall(r"from (scalewise[\w.]*) import ([\w, ]+)", MAKEFILE)
    assert len(imports) >= 3
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(import_module(module), name.strip()), f"{module}.{name}"
