"""Printed overrides are read back from a shell with the same value."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.fixes import parse_value, shown_alternatives
from hypothesis import example, given
from hypothesis import strategies as st

from scalewise.console import printable
from scalewise.data.tokenizer import TokenizerSource
from scalewise.run_files import json_text
from scalewise.typed_override import format_override

SOURCE = Path(__file__).parents[2] / "src"
FIX_VERBS = re.compile(
    r"(set|give|write|add|try|use|choose|have|leave|remove|put|if you trust|the default|to add)\b"
)
"""Verbs with which fixes begin."""


def read_back(overrides: str) -> object:
    (word,) = shlex.split(overrides)
    return parse_value(word)


@pytest.mark.parametrize(
    "value",
    ["</s>", "<|endoftext|>", "a b", "it's", "\\", "\\'", "[x]", "null", "12", "", "a,b", "x=y",
     "a/b*.txt", "-x", "é", "\"", None, True, 3, 2.5, ["a", "b c"], []],
)  # fmt: skip
def test_typed_value_round_trips(value: object) -> None:
    assert read_back(format_override("data.end_of_text", value)) == value


TEXT = st.text(
    alphabet=st.sampled_from("ab'\\ ,=[]{}()<>|#:\"*?~!&;1.-$%/`é語") | st.characters(), max_size=12
)


@given(TEXT.filter(lambda text: printable(text, spaces=False) == text))
@example("~/a=b/c")
@example("${name}")
def test_typed_text_round_trips(value: str) -> None:
    assert read_back(format_override("question", value)) == value
    assert read_back(format_override("data.paths", [value, "x"])) == [value, "x"]
    assert read_back(format_override("data.x", {"a b": value})) == {"a b": value}


@given(TEXT)
def test_messages_print_overrides_as_typed(value: str) -> None:
    word = format_override("question", value)
    assert printable(word, spaces=False) == word


def test_fix_of_an_empty_end_of_text_can_be_typed() -> None:
    (issue,) = TokenizerSource(512, end_of_text="").validate()
    assert read_back(issue.fix.removeprefix("set ")) == "<|endoftext|>"


def texts(file: Path) -> Iterator[str]:
    """Yield the strings of a source file without docstrings; interpolations are typed."""
    tree = ast.parse(file.read_text("utf-8"))
    inner_nodes = {id(inner_node) for node in ast.walk(tree) for inner_node in _parts(node)}
    for node in ast.walk(tree):
        if id(node) in inner_nodes:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(inner_node.value)
                if isinstance(inner_node, ast.Constant)
                else _inserted(inner_node)
                for inner_node in node.values
            )


def _parts(node: ast.AST) -> list[ast.AST]:
    """Child nodes that are not texts themselves: constants of f-strings, and docstrings."""
    if isinstance(node, ast.JoinedStr):
        return [inner_node for inner_node in ast.walk(node) if inner_node is not node]
    return [node.value] if isinstance(node, ast.Expr) else []


def _inserted(node: ast.expr) -> str:
    function_name = ast.unparse(node).lstrip("f'{\"").partition("(")[0]
    return "key=value" if function_name in ("typed", "shell_word", "command_line") else "value"


def test_fixes_in_the_source_are_quoted_for_a_shell() -> None:
    fixes = [
        text
        for file in SOURCE.rglob("*.py")
        for text in texts(file)
        if FIX_VERBS.match(text) and "=" in text
    ]
    assert len(fixes) > 200
    for fix in fixes:
        assert shown_alternatives(fix), fix


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("set a=1 b.c=2, or d=x", [["a=1", "b.c=2"], ["d=x"]]),
        ("set a=x, y or z, or leave it out", [["a=x"], ["a=y"], ["a=z"]]),
        ("write 'a=[b c]' instead", [["'a=[b c]'"]]),
        ("set \"a='b'\", or c=0 or 1", [["\"a='b'\""], ["c=0"], ["c=1"]]),
        ("the model's own, or write '~a'", [["'~a'"]]),
        ("leave it out", []),
    ],
)
def test_fix_alternatives_are_parsed(fix: str, expected: list[list[str]]) -> None:
    assert shown_alternatives(fix) == expected


@pytest.mark.parametrize(
    "fix", ["set a=[b]", "set a={b: c}", "set a=$b", "set a=1 c=~/d", "set a=*"]
)
def test_unquoted_fix_is_found(fix: str) -> None:
    with pytest.raises(AssertionError):
        shown_alternatives(fix)


def test_json_of_nan_is_null() -> None:
    content = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5, "nan"), "e": Path("p")}
    text = json_text(content)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [None, {"c": None}], "d": [1.5, "nan"], "e": "p"
    }  # fmt: skip
