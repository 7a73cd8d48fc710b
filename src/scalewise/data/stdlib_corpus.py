"""The embedded default: the sources of the running Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalewise.config.registry import register_option
from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.tokenization import END_OF_TEXT, TokenizerSource
from scalewise.errors import ConfigIssue, DataError

SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
VALIDATION_FRACTION = 0.05


@register_option("data", "corpus")
@dataclass(frozen=True)
class StdlibCorpus(DataConfig):
    """Source text of Python's standard library: real prose and code without a download."""

    sequence: int = 256
    """Sequence length, in tokens."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    megabytes: float = 8.0
    """Largest amount of source text that is read, in MB (10^6 bytes)."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; null: train a byte-level BPE on the text."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""

    @property
    def required_vocabulary(self) -> int | None:
        """Returns the size of the tokenizer that is trained; None where one is given."""
        return self.vocabulary if self.tokenizer is None else None

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Returns which tokenizer reads the text."""
        return TokenizerSource(self.vocabulary, self.tokenizer, self.end_of_text)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields numbers that cannot be."""
        yield from self.non_positive_issues("sequence", "megabytes")
        yield from self.tokenizer_source.validate()

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns the packed rows; about 5 % of the files are held out, by a hash of their path."""
        from scalewise.data.tokenized_cache import TokenizeSource, build_tokenized, load_splits

        root = Path(sysconfig.get_path("stdlib"))
        sizes = self.list_source_sizes(root)
        if len(sizes) < 2:
            reason = f"{root} has no two Python sources within that size"
            fix = "give more data.megabytes, or your own files with data=text"
            raise DataError.for_key("data.megabytes", self.megabytes, reason, fix)
        held = held_out_names(sizes, VALIDATION_FRACTION)
        train = partial(_iter_texts, root, [name for name in sizes if name not in held])
        source = TokenizeSource(
            name="corpus",
            key="data.megabytes",
            value=self.megabytes,
            identity={"python": sys.version, "files": list(sizes.items())},
            splits={"train": train, "validation": partial(_iter_texts, root, sorted(held))},
            training_documents=train,
            tokenizer_source=self.tokenizer_source,
        )
        return load_splits(
            build_tokenized(source, vocabulary), self.sequence, validation=True, hint=""
        )

    def list_source_sizes(self, root: Path) -> dict[str, int]:
        """Returns the bytes of each source by its path under ``root``, in order while they fit."""
        sizes: dict[str, int] = {}
        left = self.megabytes * 1e6
        for name in sorted(_source_files(root)):
            size = (root / name).stat().st_size
            if 0 < size <= left:
                sizes[name] = size
                left -= size
        return sizes


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Returns the names to validate on: those whose hash falls below ``fraction``.

    Adding a name moves no other across. Of two names or more at least one falls on each side.
    """
    place = {name: _hash_position(name) for name in names}
    held = {name for name in place if place[name] < fraction}
    if not held:
        return {min(place, key=place.__getitem__)}
    if len(held) == len(place):
        held.remove(max(place, key=place.__getitem__))
    return held


def _hash_position(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _source_files(root: Path) -> Iterator[str]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]
        for name in names:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _iter_texts(root: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        yield (root / name).read_text(encoding="utf-8", errors="replace")
