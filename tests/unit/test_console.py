"""Printing to streams that cannot take it: characters are lost, the work is not."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from scalewise import console


def left() -> TextIO:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def full() -> TextIO:
    """A device without room."""
    return open("/dev/full", "w", encoding="utf-8")


def closed() -> TextIO:
    """A stream that somebody has closed."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [left, full, closed, lambda: None])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_console_drops_text_of_a_closed_stream(
    stream: Callable[[], TextIO | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stream()
    monkeypatch.setattr(sys, name, given)
    with console.shield_streams(), console.shield_streams():
        for _ in range(2):
            print("a line", file=getattr(sys, name), flush=True)
        print("not flushed", file=getattr(sys, name))
    assert getattr(sys, name) is given
    if given is not None:
        given.close()


def test_console_replaces_unencodable_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))
    with console.shield_streams():
        print("a ━ b")
    assert held.getvalue() == b"a ? b\n"


CLOSED = """
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
    overrides = ["sh", "-c", shell, "sh", sys.executable, "-c", CLOSED, str(file)]
    assert subprocess.run(overrides, check=False).returncode == 0
    assert file.read_bytes() == b"only this"
