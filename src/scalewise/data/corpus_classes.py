"""Texts of two classes that need no file: code as it stands, and line by line backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalewise.config.registry import option
from scalewise.data.corpus_pairs import CorpusPairs, spaced

if TYPE_CHECKING:
    from scalewise.data.answers import Written

LINES = 4
"""Lines of a text."""


@option("data", "corpus_classes")
@dataclass(frozen=True)
class CorpusClasses(CorpusPairs):
    """Lines of Python's standard library, of every second text with its words backwards."""

    sequence: int = 128
    """Tokens of a row; of a longer text the end is left out."""

    kind: ClassVar[str] = "corpus_classes"
    record: ClassVar[str] = "text"
    pairs = False
    classes = ("backwards", "forwards")

    def written(self, root: Path, names: Iterable[str]) -> Iterator[Written]:
        """Yields texts, of either class as many."""
        from scalewise.data.labelled import classed

        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if len(line.split()) > 2]
            for at in range(0, len(lines) - LINES + 1, LINES):
                number = at // LINES % 2
                some = [
                    spaced(line, line.split()[:: 1 if number else -1])
                    for line in lines[at : at + LINES]
                ]
                yield (classed("\n".join(some), number),)
