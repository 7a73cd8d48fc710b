"""User-defined text files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.file_patterns import file_suffix, match_paths, path_issues
from scalewise.data.stdlib_corpus import held_out_names
from scalewise.data.text_files import (
    PLAIN_SUFFIXES,
    RECORD_SUFFIXES,
    Document,
    iter_documents,
    text_chunks,
)
from scalewise.data.tokenization import END_OF_TEXT, Documents, TokenizerSource
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option


@register_option("data", "text")
@dataclass(frozen=True)
class TextData(DataConfig):
    """Text files, tokenized once into a cache, and again when a file changes."""

    sequence: int = 256
    """Sequence length, in tokens."""
    paths: tuple[str, ...] = ()
    """Glob patterns of plain text, .jsonl and .parquet files, relative to the working directory."""
    field: str | None = None
    """Field of .jsonl and .parquet files with the text."""
    tokenizer: str | None = None
    """Path of a tokenizer.json or of a tokenizer's folder; null: train a byte-level BPE on the
    text."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""
    special_tokens: bool = True
    """Whether documents get the special tokens that the tokenizer adds, such as a leading <bos>."""
    validation_fraction: float = 0.05
    """Validation fraction, by file, or within the file if there is one; 0: none."""

    @property
    def required_vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer that is trained; None with a given one."""
        return self.vocabulary if self.tokenizer is None else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files, a missing field, and values out of range."""
        yield from self.non_positive_issues("sequence")
        yield from self._tokenizer_source.validate()
        if not 0 <= self.validation_fraction < 1:
            reason = "must be at least 0 and below 1"
            fix = "set data.validation_fraction=0.05"
            yield ConfigIssue("data.validation_fraction", self.validation_fraction, reason, fix)
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.txt]'")
        yield from path_issues(
            "data.paths", self.paths, PLAIN_SUFFIXES | RECORD_SUFFIXES, "my/*.txt"
        )
        records = [path for path in match_paths(self.paths) if file_suffix(path) in RECORD_SUFFIXES]
        if records and not self.field:
            reason = f"{records[0]} contains records, whose text field is not set"
            yield ConfigIssue("data.field", "null", reason, "set data.field=text")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Tokenize the files into the cache, and return packed sequences of both splits."""
        from scalewise.data import content
        from scalewise.data.tokenized_cache import TokenizeSource, build_tokenized, load_splits

        if issues := list(self.validate()):
            raise DataError(issues)
        files = content.digests_by_content(match_paths(self.paths))
        parts = self._split_documents(files)
        identity = {
            "files": [[digest, file_suffix(file)] for file, digest in files.items()],
            "field": self.field,
            "validation_fraction": self.validation_fraction,
        }
        source = TokenizeSource(
            name="text",
            key="data.paths",
            value=list(self.paths),
            identity=identity,
            splits=parts,
            training_documents=parts["train"],
            tokenizer_source=self._tokenizer_source,
        )
        folder = build_tokenized(source, vocabulary)
        return load_splits(folder, self.sequence, validation="validation" in parts)

    @property
    def _tokenizer_source(self) -> TokenizerSource:
        return TokenizerSource(
            self.vocabulary, self.tokenizer, self.end_of_text, self.special_tokens
        )

    def _split_documents(self, digests: Mapping[Path, str]) -> dict[str, Documents]:
        """Return the documents of each split: by the digests of files, or within each file.

        A single file is split within itself, and so are files with equal content.
        """
        fraction, files = self.validation_fraction, list(digests)
        if not fraction:
            return {"train": partial(_iter_all, files, self.field)}
        if len({*digests.values()}) == 1:
            iter_side = partial(_iter_split, files, self.field, fraction)
            return {
                "train": partial(iter_side, held_out=False),
                "validation": partial(iter_side, held_out=True),
            }
        validation_digests = held_out_names(digests.values(), fraction)
        sides: dict[bool, list[Path]] = {False: [], True: []}
        for file, digest in digests.items():
            sides[digest in validation_digests].append(file)
        return {
            "train": partial(_iter_all, sides[False], self.field),
            "validation": partial(_iter_all, sides[True], self.field),
        }


def _iter_all(files: list[Path], field: str | None) -> Iterator[Document]:
    for file in files:
        yield from iter_documents(file, field)


def _iter_split(
    files: list[Path], field: str | None, fraction: float, *, held_out: bool
) -> Iterator[Document]:
    for file in files:
        yield from _iter_single_file_split(file, field, fraction, held_out=held_out)


def _iter_single_file_split(
    file: Path, field: str | None, fraction: float, *, held_out: bool
) -> Iterator[Document]:
    """Yield one side of a single file: every 1/fraction-th record, or the end of plain text."""
    if file_suffix(file) in RECORD_SUFFIXES:
        for index, document in enumerate(iter_documents(file, field)):
            if (int((index + 1) * fraction) > int(index * fraction)) is held_out:
                yield document
        return
    (full_document,) = iter_documents(file, field)
    split_position = _last_line_start(
        file, int(sum(map(len, full_document.chunks)) * (1 - fraction))
    )
    yield Document(
        _slice_chunks(text_chunks(file), split_position, held_out=held_out), full_document.source
    )


def _last_line_start(file: Path, limit: int) -> int:
    """Return the start of the last line that begins within ``limit`` characters.

    A longer first line is split at ``limit``.
    """
    start = characters = 0
    for chunk in text_chunks(file):
        if (newline := chunk.rfind("\n", 0, limit - characters)) >= 0:
            start = characters + newline + 1
        characters += len(chunk)
        if characters >= limit:
            break
    return start or limit


def _slice_chunks(chunks: Iterable[str], position: int, *, held_out: bool) -> Iterator[str]:
    """Yield the characters of chunks before ``position``, or those after it."""
    for chunk in chunks:
        yield chunk[max(0, position) :] if held_out else chunk[: max(0, position)]
        position -= len(chunk)
