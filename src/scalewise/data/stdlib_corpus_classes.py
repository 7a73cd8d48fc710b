"""Texts of two classes that need no file: code as it stands, and line by line backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalewise.config.registry import register_option
from scalewise.data.stdlib_corpus_pairs import StdlibCorpusPairs, normalize_spaces

if TYPE_CHECKING:
    from scalewise.data.chat_cache import Written

LINES = 4
"""Lines of a text."""


@register_option("data", "corpus_classes")
@dataclass(frozen=True)
class StdlibCorpusClasses(StdlibCorpusPairs):
    """Two classes of text from Python's standard library: as written, and words reversed."""

    sequence: int = 128
    """Sequence length, in tokens; longer texts are truncated."""

    kind: ClassVar[str] = "corpus_classes"
    record_description: ClassVar[str] = "text"
    pairs = False
    classes = ("backwards", "forwards")

    def iter_records(self, root: Path, names: Iterable[str]) -> Iterator[Written]:
        """Yields texts, of either class as many."""
        from scalewise.data.labeled_text import parse_labeled

        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if len(line.split()) > 2]
            for at in range(0, len(lines) - LINES + 1, LINES):
                number = at // LINES % 2
                some = [
                    normalize_spaces(line, line.split()[:: 1 if number else -1])
                    for line in lines[at : at + LINES]
                ]
                yield (parse_labeled("\n".join(some), number),)
