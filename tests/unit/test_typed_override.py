"""Overrides that messages print are read back from a shell as what they stand for."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from scalewise.data.tokenizing import Tokenization
from scalewise.tracking.files import json_text
from scalewise.typed_override import typed

README = Path(__file__).parents[2] / "README.md"


def read_back(line: str) -> object:
    (word,) = shlex.split(line)
    return OverridesParser.create().parse_override(word).value()


@pytest.mark.parametrize(
    "value",
    ["</s>", "<|endoftext|>", "a b", "it's", "\\", "\\'", "[x]", "null", "12", "", "a,b", "x=y",
     "a/b*.txt", "-x", "é", "\"", None, True, 3, 2.5, ["a", "b c"], []],
)  # fmt: skip
def test_a_value_is_read_back(value: object) -> None:
    assert read_back(typed("data.end_of_text", value)) == value


@given(st.text(alphabet="ab'\\ ,=[]{}()<>|#:\"*?~!&;1.-", max_size=12))
def test_any_text_is_read_back(value: str) -> None:
    assert read_back(typed("question", value)) == value


def test_the_fix_of_an_empty_end_of_text_can_be_typed() -> None:
    (complaint,) = Tokenization(512, end_of_text="").complaints()
    assert read_back(complaint.cure.removeprefix("give ")) == "<|endoftext|>"


def test_commands_of_the_readme_can_be_typed() -> None:
    parser = OverridesParser.create()
    lines = [
        line.partition("  #")[0]
        for line in README.read_text("utf-8").splitlines()
        if line.startswith(("scalewise train ", "scalewise plan "))
    ]
    assert lines
    for line in lines:
        for word in shlex.split(line)[2:]:
            if not word.startswith("-") and "..." not in word and "=" in word:
                parser.parse_override(word)


def test_numbers_that_json_lacks_are_null() -> None:
    content = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5, "nan"), "e": Path("p")}
    text = json_text(content)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [None, {"c": None}], "d": [1.5, "nan"], "e": "p"
    }  # fmt: skip
