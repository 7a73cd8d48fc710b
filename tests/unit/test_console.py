"""Printing to streams that fail or lack characters."""

import ast
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from scalewise import console


def pipe_without_reader() -> TextIO:
    """Pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def full_device() -> TextIO:
    """Device without free space."""
    return open("/dev/full", "w", encoding="utf-8")


def closed_text_stream() -> TextIO:
    """Closed stream."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream", [pipe_without_reader, full_device, closed_text_stream, lambda: None]
)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_console_drops_text_of_a_closed_stream(
    stream: Callable[[], TextIO | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_stream = stream()
    monkeypatch.setattr(sys, name, closed_stream)
    with console.shield_streams(), console.shield_streams():
        for _ in range(2):
            print("a line", file=getattr(sys, name), flush=True)
        print("not flushed", file=getattr(sys, name))
    assert getattr(sys, name) is closed_stream
    if closed_stream is not None:
        closed_stream.close()


def test_console_replaces_unencodable_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    with console.shield_streams():
        print("a ━ b")
    assert buffer.getvalue() == b"a ? b\n"


def test_log_messages_are_printed_once_as_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, logger = logging.getLogger("scalewise"), logging.getLogger("scalewise.data.text_files")
    before = ([], logging.NOTSET, True)
    for name, value in zip(("handlers", "level", "propagate"), before, strict=True):
        monkeypatch.setattr(package, name, value)
    with console.shield_streams(), console.shield_streams():
        logger.debug("hidden")
        logger.info("100% of \x1b[1m a\nline")
        logger.warning("a warning")
    captured = capsys.readouterr()
    assert captured.out == "100% of \\x1b[1m a\\nline\n"
    assert captured.err == "a warning\n"
    assert (package.handlers, package.level, package.propagate) == before


SOURCE = Path(__file__).parents[2] / "src"
PRINTING_MODULES = (
    "scalewise/bench/",  # tables of `scalewise bench`, row by row
    "scalewise/cli.py",
    "scalewise/commands/",
    "scalewise/config/app.py",
    "scalewise/config/sweep_jobs.py",  # progress of the validation of jobs
    "scalewise/console.py",
    "scalewise/plain_console.py",
    "scalewise/training/callbacks/progress_display.py",
)
"""Modules of the command line and displays of progress; all others log."""
PRINT_FUNCTIONS = {"print", "print_lines", "get_console", "PlainConsole", "show_progress"}
STREAM_METHODS = {
    f"sys.{name}.{end}" for name in ("stdout", "stderr") for end in ("write", "writelines")
}


def printing_calls(path: Path) -> list[str]:
    """Printing calls of a file, with their lines."""
    calls = [
        node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    names = [(node.lineno, ast.unparse(node.func)) for node in calls]
    return [
        f"line {line}: {name}"
        for line, name in names
        if name.rpartition(".")[2] in PRINT_FUNCTIONS or name in STREAM_METHODS
    ]


def test_only_the_command_line_and_progress_displays_print() -> None:
    files = {str(path.relative_to(SOURCE)): path for path in SOURCE.rglob("*.py")}
    assert all(any(name.startswith(entry) for name in files) for entry in PRINTING_MODULES)
    calls = {
        name: printing_calls(path)
        for name, path in files.items()
        if not name.startswith(PRINTING_MODULES)
    }
    assert {name: call_lines for name, call_lines in calls.items() if call_lines} == {}


def test_printing_calls_are_detected(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    sys.stderr.write('a')\n    print()\nconsole.print_lines('a')\n")
    names = ["line 2: sys.stderr.write", "line 3: print", "line 4: console.print_lines"]
    assert sorted(printing_calls(file)) == names


CLOSED_STREAMS_SCRIPT = """
import os, sys
from scalewise import console
console.open_standard_streams()
print("dropped", sys.stdin.read(), file=sys.stderr)
opened = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(opened, b"only this")
"""


def test_console_does_not_reuse_closed_descriptors(tmp_path: Path) -> None:
    file = tmp_path / "file"
    shell = 'exec "$@" <&- >&- 2>&-'
    overrides = ["sh", "-c", shell, "sh", sys.executable, "-c", CLOSED_STREAMS_SCRIPT, str(file)]
    assert subprocess.run(overrides, check=False).returncode == 0
    assert file.read_bytes() == b"only this"
