"""Printed overrides pass a POSIX shell unchanged."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest
from fixtures.fixes import parse_value, shown_alternatives

from scalewise.typed_override import format_override

CHARACTERS = "ab'\\ ,=[]{}()<>|#:\"*?~!&;1.-$%/`" + "\n\t\r\x1b\u200b\u00a0é語"
TEXT_PIECES = [*CHARACTERS, "${a}", "$(b)", "\\\n"]
VALUES = ["", "~", "~/a=b", "a b", "$HOME", "\n", "a\n", "é", "\\", "'", '"', "!!", "#", "null"]


def values() -> list[object]:
    """Texts that shells or Hydra interpret, alone and in containers."""
    rng = random.Random(1)
    texts = ["".join(rng.choices(TEXT_PIECES, k=rng.randint(1, 9))) for _ in range(400)]
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
    shell_words = [format_override("key", value) for value in values()]
    for shell_word in shell_words:
        assert shown_alternatives(f"set {shell_word}, or leave it out") == [[shell_word]], (
            shell_word
        )
    script = f"printf '%s\\0' {' '.join(shell_words)}"
    completed = subprocess.run([shell], input=script.encode(), capture_output=True, check=True)
    assert not completed.stderr
    read_words = completed.stdout.decode().split("\0")[:-1]
    assert [parse_value(shell_word) for shell_word in read_words] == values()
