"""Private words stay out of names, docstrings, comments, messages, options and documentation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE_PHRASES = {
    r"foreseen|foresees?|foresaw|foretells?": "predicted",
    r"cures?": "suggested fix",
    r"complaints?": "config issue",
    r"refus(es|al|als|ing)|(is|are|was|were|be) refused": "rejected",
    r"ledgers?": "memory breakdown",
    r"verdicts?": "fit status",
    r"tapes?": "operator graph",
    r"passages?": "command context",
    r"nurser(y|ies)|crews?": "worker pool",
    r"bereft": "peer failure",
    r"newborns?": "worker",
    r"rungs?": "ablation step",
    r"made again|comes? again": "recomputed",
    r"anew": "from scratch, again",
    r"goes on|go on": "resumes, continues",
    r"goes with": "is compatible with",
    r"hides? behind": "overlaps with",
    r"rows a pass|a pass of": "micro-batch size, forward pass",
    r"in pieces|pieces": "chunks, micro-batches",
    r"mends?|mended": "fixes",
    r"at rest": "default, idle",
    r"few new weights": "parameter-efficient",
    r"learn(t|s) of|told of|tells of": "predicted, reported",
    r"houses?|floors of": "package, layers",
    r"strangers?": "user",
    r"(Returns|Yields) what": "a noun phrase",
    r"of the user's|of yours": "user-defined",
}
"""Words with no second meaning in this project, and the term to write instead."""
PATTERN = re.compile(rf"\b({'|'.join(PRIVATE_PHRASES)})\b", re.IGNORECASE)
PRIVATE_NAMES = frozenset(
    [
        "anew",
        "bereft",
        "complaint",
        "complaints",
        "crew",
        "cure",
        "cures",
        "doors",
        "foreseen",
        "ledger",
        "mend",
        "newborn",
        "nursery",
        "passage",
        "rung",
        "rungs",
        "tape",
        "tapes",
        "verdict",
    ]
)
FROZEN_NAMES = {
    "bench/memory_accuracy.py": {"foreseen"},
    "launch/status_file.py": {"cures"},
    "plan_config.py": {"ledger"},
    "unit/launch/test_status_file.py": {"cures"},
    "record_types.py": {"cures", "ledger"},
}
"""Names that are keys of records, run folders and options, by file."""
FROZEN_TEXTS = (
    "bench ledger",
    "plan.method=ledger",
    "activations of other pieces",
    "has refusal, which is not supported",
)
"""Commands, option values, keys of plan.json and keys of chat records."""
SOURCES = sorted(
    path
    for folder in ("src", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path.name not in ("test_plain_language.py", "test_option_docs.py")  # they list the words
)
TEXTS = sorted(
    path
    for pattern in (
        "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile",
        "docs/**/*.md", "conf/**/*.yaml", "experiments/**/*.yaml", "sweeps/*.yaml",
        "src/**/*.j2", "src/**/*.js",
    )
    for path in ROOT.glob(pattern)
)  # fmt: skip


def names_and_texts(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a name, of names, comments and strings with spaces.

    Strings without a space may be keys of run files, whose names are frozen.
    """
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value, False
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id, True
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, True
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name, True
    for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def private_words(text: str, is_name: bool) -> list[str]:
    for frozen in FROZEN_TEXTS:
        text = text.replace(frozen, "")
    if is_name:
        parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower().split("_")
        return [part for part in parts if part in PRIVATE_NAMES]
    return [match[0] for match in PATTERN.finditer(text)]


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", SOURCES, ids=ident)
def test_source_uses_the_terms_of_the_field(file: Path) -> None:
    frozen = next(
        (names for end, names in FROZEN_NAMES.items() if ident(file).endswith(end)), set()
    )
    violations = [
        f"{ident(file)}:{line}: {word!r} in {text[:100]!r}"
        for line, text, is_name in names_and_texts(file)
        for word in private_words(text, is_name)
        if not (is_name and word in frozen)
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("file", TEXTS, ids=ident)
def test_text_uses_the_terms_of_the_field(file: Path) -> None:
    lines = file.read_text("utf-8").splitlines()
    violations = [
        f"{ident(file)}:{number}: {word!r} in {line[:100]!r}"
        for number, line in enumerate(lines, 1)
        for word in private_words(re.sub(r"`[^`]*`", "", line), is_name=False)
    ]
    assert not violations, "\n".join(violations)


def test_private_words_are_found() -> None:
    assert private_words("how a ledger is cured anew", is_name=False) == ["ledger", "anew"]
    assert private_words("suggested_cure", is_name=True) == ["cure"]
    assert private_words("MemoryLedger", is_name=True) == ["ledger"]
