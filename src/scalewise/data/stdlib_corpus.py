"""Built-in default data: the source code of the Python standard library."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.tokenization import END_OF_TEXT, TokenizerSource
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option

SKIPPED_FOLDERS = frozenset(
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
        """Vocabulary size of the tokenizer that is trained; None with a given one."""
        return self.vocabulary if self.tokenizer is None else None

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Tokenizer of the text."""
        return TokenizerSource(self.vocabulary, self.tokenizer, self.end_of_text)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield values out of range."""
        yield from self.non_positive_issues("sequence", "megabytes")
        yield from self.tokenizer_source.validate()

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return packed sequences; about 5 % of the files are held out, by a hash of their path."""
        from scalewise.data.tokenized_cache import TokenizeSource, build_tokenized, load_splits

        root = Path(sysconfig.get_path("stdlib"))
        sizes = self.list_source_sizes(root)
        if len(sizes) < 2:
            reason = f"{root} has fewer than two Python sources within that size"
            fix = "increase data.megabytes, or use other files with data=text"
            raise DataError.for_key("data.megabytes", self.megabytes, reason, fix)
        validation_names = held_out_names(sizes, VALIDATION_FRACTION)
        iter_train = partial(
            _iter_texts, root, [name for name in sizes if name not in validation_names]
        )
        source = TokenizeSource(
            name="corpus",
            key="data.megabytes",
            value=self.megabytes,
            identity={"python": sys.version, "files": list(sizes.items())},
            splits={
                "train": iter_train,
                "validation": partial(_iter_texts, root, sorted(validation_names)),
            },
            training_documents=iter_train,
            tokenizer_source=self.tokenizer_source,
        )
        return load_splits(
            build_tokenized(source, vocabulary), self.sequence, validation=True, hint=""
        )

    def list_source_sizes(self, root: Path) -> dict[str, int]:
        """Return the bytes of each source file by its relative path, up to ``megabytes`` in
        total."""
        sizes: dict[str, int] = {}
        remaining = self.megabytes * 1e6
        for name in sorted(_source_files(root)):
            size = (root / name).stat().st_size
            if 0 < size <= remaining:
                sizes[name] = size
                remaining -= size
        return sizes


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Return the names of the validation split: those whose hash is below ``fraction``.

    Adding a name moves no other name between splits. With two or more names, neither split is
    empty.
    """
    hashes = {name: _unit_hash(name) for name in names}
    selected = {name for name in hashes if hashes[name] < fraction}
    if not selected:
        return {min(hashes, key=hashes.__getitem__)}
    if len(selected) == len(hashes):
        selected.remove(max(hashes, key=hashes.__getitem__))
    return selected


def _unit_hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _source_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _iter_texts(root: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        yield (root / name).read_text(encoding="utf-8", errors="replace")
