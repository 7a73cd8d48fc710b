"""Text of users, files and servers is printed as plain text."""

from __future__ import annotations

import ast
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.run_folders import make_run, make_sweep

from scalewise import cli, console
from scalewise.commands import show, show_plan, usage
from scalewise.errors import ConfigError
from scalewise.launch.executor import SweepTask
from scalewise.launch.job import JobSpec, Result
from scalewise.plain_console import get_console, styled_text
from scalewise.planner.plan import build_plan
from scalewise.run_config import RunConfig

SOURCE = Path(console.__file__).parent
HOSTILE = (
    "[/data/a.txt] [bold]b[/] [/] 'callbacks=[]' :smile: \N{PARTY POPPER} \x1b[31mred\x1b[0m "
    "\x1b]0;title\x07 \r\n\t\x00\x9b1m \N{RIGHT-TO-LEFT OVERRIDE}\u2028 \ud800 <img src=x>"
)
SHOWN_PARTS = (
    "[/data/a.txt]",
    "[bold]b[/]",
    "callbacks=[]",
    ":smile:",
    "\N{PARTY POPPER}",
    "\\x1b[31m",
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_plain(output: str) -> None:
    """Assert that the text has no control characters but line feeds."""
    for character in output.replace("\n", ""):
        kind = unicodedata.category(character)
        assert kind not in ("Cc", "Cf", "Cs", "Zl", "Zp"), f"{character!a} in {output!a}"


def assert_shown(output: str) -> None:
    """Assert that the text is plain and shows the hostile string, including its markup."""
    assert_plain(output)
    printed_text = "".join(output.split())
    for part in SHOWN_PARTS:
        assert part.replace(" ", "") in printed_text, output


def test_only_one_module_prints() -> None:
    calls = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if path.name != "console.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not any(k.arg == "file" and isinstance(k.value, ast.Name) for k in node.keywords)
    }
    assert calls == set(), "use scalewise.console.print_lines"


def test_only_one_module_makes_consoles() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        if path.name != "plain_console.py":
            assert " Console(" not in text, f"{path}: use scalewise.plain_console.get_console"
            assert "rich.markup" not in text, path


@pytest.mark.parametrize("stderr", [False, True])
def test_printed_lines_are_plain(stderr: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console.print_lines("one", HOSTILE, "three", stderr=stderr)
    captured = capsys.readouterr()
    output = captured.err if stderr else captured.out
    assert_shown(output)
    assert len(output.splitlines()) == 3


def test_rich_consoles_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table(title=HOSTILE)
    table.add_column(HOSTILE, overflow="fold")
    table.add_row(HOSTILE)
    get_console().print(HOSTILE, HOSTILE)
    get_console().print(table, styled_text(HOSTILE, (HOSTILE, "red")))
    assert_shown(capsys.readouterr().out)


def test_printed_scripts_and_emoji_are_kept() -> None:
    allowed_text = (
        "naïve Ωμέγα 漢字 हिन्दी \u200c \N{MAN}\u200d\N{PERSONAL COMPUTER} \u00a0\u3000 e\u0301"
    )
    assert console.printable(allowed_text) == allowed_text


def test_error_prints_one_line_per_issue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ConfigError.for_key(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    assert len(str(error).splitlines()) == 2
    console.print_lines(*str(error).split("\n"))
    assert_shown(capsys.readouterr().out)


@pytest.mark.parametrize("command", usage.COMMANDS)
def test_commands_reject_hostile_arguments_in_plain_text(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    no_null = HOSTILE.replace("\x00", "")
    for arguments in ([no_null], [f"name={no_null}"], [f"--{no_null}"], [f"model={no_null}"]):
        assert cli.main([command, *arguments]) == 2, (command, arguments)
        captured = capsys.readouterr()
        assert_plain(captured.out + captured.err)
        assert "scalewise: " in captured.err, arguments
    assert list(Path.cwd().iterdir()) == []


def test_unknown_command_is_rejected_in_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([HOSTILE]) == 2
    assert_plain(capsys.readouterr().err)


def _with_hostile_strings(value: Any, kept_keys: frozenset[str], key: str = "") -> Any:
    """Copy of JSON content with every string hostile except those of ``kept_keys``."""
    if isinstance(value, dict):
        return {
            name: _with_hostile_strings(entry, kept_keys, name) for name, entry in value.items()
        }
    if isinstance(value, list):
        return [_with_hostile_strings(entry, kept_keys, key) for entry in value]
    return HOSTILE if isinstance(value, str) and key not in kept_keys else value


def _damage(folder: Path, kept_keys: frozenset[str]) -> None:
    for file in folder.rglob("*.json"):
        content = _with_hostile_strings(json.loads(file.read_text("utf-8")), kept_keys)
        file.write_text(json.dumps(content), "utf-8")


KEPT_KEYS = frozenset({"folder", "planned_folder", "started", "ended", "key", "host"})


@pytest.mark.parametrize("kept_keys", [KEPT_KEYS, KEPT_KEYS | {"status", "verb"}])
def test_commands_print_hostile_run_folders_in_plain_text(
    kept_keys: frozenset[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breakdown = {"ledger": {"weights": 2.0**30}, "step_parts": {"products": 0.1}}
    first_run, second_run = (
        make_run(tmp_path / name, steps=4, plan=breakdown, reason="r", log_tail=["line"], seed=seed)
        for seed, name in enumerate(("one", "other"), start=1)
    )
    sweep = make_sweep(tmp_path / "sweep", {"seed": ["1", "2"]}, lambda n, v: {"steps": 4})
    for folder in (first_run, second_run, sweep):
        _damage(folder, kept_keys)
    jobs = [str(path.parent) for path in sweep.rglob("status.json")]
    for arguments in (
        ["status", str(first_run)],
        ["status", str(sweep)],
        ["status", *jobs],
        ["report", str(first_run)],
        ["report", str(sweep)],
        ["plan", "explain", str(first_run), str(second_run)],
        ["evaluate", str(first_run)],
        ["export", str(first_run)],
        ["publish", str(first_run)],
    ):
        assert cli.main(arguments) in (0, 1, 2), arguments
        captured = capsys.readouterr()
        assert_plain(captured.out + captured.err)
    for page in tmp_path.rglob("report.html"):
        assert "<img" not in page.read_text("utf-8", errors="replace"), page


def test_status_shows_what_a_sweep_varies_as_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"data.paths": ["[/data/a.txt]", "[/data/b.txt]"]}
    sweep = make_sweep(tmp_path / "sweep", axes, lambda n, v: {"steps": 4})
    assert cli.main(["status", str(sweep)]) == 0
    assert "[/data/a.txt]" in capsys.readouterr().out


@pytest.fixture
def task(compose: Callable[..., RunConfig], tmp_path: Path) -> SweepTask:
    run = compose("experiment=smoke")
    order = JobSpec(run, HOSTILE, varied={"data.paths": "[/data/a.txt]", HOSTILE: HOSTILE})
    return SweepTask(0, order, tmp_path)


def test_train_prints_a_hostile_sweep_in_plain_text(
    task: SweepTask, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [Result(status, HOSTILE, 1, task.folder, {}) for status in ("failed", HOSTILE)]
    show.print_job_start(task, 2)
    for result in results:
        show.print_job_outcome(task, result)
    show.print_job_table([task, task], results)
    show.print_resume_summary(2, 1, task.folder / HOSTILE)
    assert_shown(capsys.readouterr().out)


def test_search_prints_hostile_values_in_plain_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trial = {
        "number": 0,
        "state": HOSTILE,
        "params": {HOSTILE: HOSTILE},
        "values": [1.0],
        "folder": "0",
    }
    record = {
        "study": HOSTILE,
        "wanted": 1,
        "trials": [trial],
        "best": [0],
        "objectives": ["val/loss"],
        "importance": {HOSTILE: {HOSTILE: 0.5}},
    }
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "status.json").write_text(json.dumps({"command": HOSTILE}))
    show.print_rejected_trial(0, {HOSTILE: HOSTILE}, HOSTILE)
    show.print_search_result(record, tmp_path)
    assert_shown(capsys.readouterr().out)


def test_plan_shows_lists_as_typed(
    compose: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text\n" * 100)
    list_overrides = ("data=text", f"data.paths=[{file}]", "data.vocabulary=512", "callbacks=[]")
    small_overrides = ("trainer.micro_batch=32", "data.sequence=512")
    large_run = compose(
        *small_overrides,
        "model=llama_160m",
        "hardware=rtx4090",
        "hardware.memory_gib=4",
        *list_overrides,
        check_machine=False,
    )
    plan = build_plan(large_run)
    show_plan.print_plan(plan)
    show_plan.print_plan_table([({"data.paths": f"[{file}]", HOSTILE: HOSTILE}, plan)])
    output = capsys.readouterr().out
    assert_shown(output)
    (line,) = [line for line in output.splitlines() if line.startswith("scalewise train")]
    assert f"'data.paths=[{file}]'" in line
    assert "'callbacks=[]'" in line
