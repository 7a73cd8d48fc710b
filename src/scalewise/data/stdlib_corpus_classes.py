"""Text classification without input files: source code, and the same lines backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalewise.data.stdlib_corpus_pairs import StdlibCorpusPairs, normalize_spaces
from scalewise.registry import register_option

if TYPE_CHECKING:
    from scalewise.data.chat_cache import RenderedRecord

TEXT_LINES = 4
"""Number of lines of a text."""


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

    def iter_records(self, root: Path, names: Iterable[str]) -> Iterator[RenderedRecord]:
        """Yield equally many texts of both classes."""
        from scalewise.data.labeled_text import parse_labeled

        for name in names:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if len(line.split()) > 2]
            for start in range(0, len(lines) - TEXT_LINES + 1, TEXT_LINES):
                class_index = start // TEXT_LINES % 2
                text_lines = [
                    normalize_spaces(line, line.split()[:: 1 if class_index else -1])
                    for line in lines[start : start + TEXT_LINES]
                ]
                yield (parse_labeled("\n".join(text_lines), class_index),)
