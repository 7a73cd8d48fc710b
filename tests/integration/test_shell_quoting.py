"""A POSIX shell passes printed overrides on unchanged."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest
from fixtures.fixes import parse_value, shown_alternatives

from scalewise.typed_override import format_override

CHARACTERS = "ab'\\ ,=[]{}()<>|#:\"*?~!&;1.-$%/`" + "\n\t\r\x1b\u200b\u00a0é語"
PIECES = [*CHARACTERS, "${a}", "$(b)", "\\\n"]
VALUES = ["", "~", "~/a=b", "a b", "$HOME", "\n", "a\n", "é", "\\", "'", '"', "!!", "#", "null"]


def values() -> list[object]:
    """Returns texts of what shells and Hydra read as more than text, alone and in containers."""
    draw = random.Random(1)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 9))) for _ in range(400)]
    return [
        *VALUES,
        *texts,
        VALUES,
        texts[:9],
        {"a b": texts[9], "c": [texts[10]]},
        None,
        True,
        2.5,
    ]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh"])
def test_printed_overrides_survive_a_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    words = [format_override("key", value) for value in values()]
    for word in words:
        assert shown_alternatives(f"set {word}, or leave it out") == [[word]], word
    script = f"printf '%s\\0' {' '.join(words)}"
    done = subprocess.run([shell], input=script.encode(), capture_output=True, check=True)
    assert not done.stderr
    read = done.stdout.decode().split("\0")[:-1]
    assert [parse_value(word) for word in read] == values()
