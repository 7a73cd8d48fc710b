"""Built-in data: the source code of the Python standard library, as text, pairs and classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scalewise.data.base import TokenizedDataConfig
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option


@register_option("data", "corpus")
@dataclass(frozen=True)
class StdlibCorpus(TokenizedDataConfig):
    """Source text of Python's standard library: real prose and code without a download."""

    sequence: int = 256
    """Sequence length, in tokens."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    megabytes: float = 8.0
    """Largest amount of source text that is read, in MB (10^6 bytes)."""
    folder: str = ""
    """Folder of the standard library that is read, such as email; empty: all of it."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; null: train a byte-level BPE on the text."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""

    implementation = "scalewise.data.stdlib_sources"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield values out of range."""
        yield from self.non_positive_issues("megabytes")
        yield from super().validate()


@register_option("data", "corpus_pairs")
@dataclass(frozen=True)
class StdlibCorpusPairs(StdlibCorpus):
    """Preference pairs from Python's standard library: the rejected answer is shuffled.

    Each line of a rejected answer has the words of the chosen one in another order.
    """

    sequence: int = 128
    """Length of a prompt with its answer, in tokens; longer ones are truncated."""
    vocabulary: int = 1024
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    megabytes: float = 2.0
    """Largest amount of source text that is read, in MB (10^6 bytes)."""

    kind: ClassVar[str] = "corpus_pairs"
    record_description: ClassVar[str] = "pair"
    pairs = True


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
