"""Files of token ids, whose writing continues after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalewise.data.text_files import Document
from scalewise.data.tokenizer import Documents

PROGRESS_FILE = "progress.json"
"""File that exists while the files of a folder are incomplete."""
GROUP_CHARACTERS = 16_000_000
"""Characters after which the progress is saved; at most so many are tokenized again."""

EncodeDocuments = Callable[[Iterable[str | Document]], Iterable[NDArray[np.uint32]]]
"""Function that returns the ids of documents, of each independently of the others."""


class TokenFiles:
    """Files ``SPLIT.bin`` in a folder, with the progress of their tokenization.

    Args:
        folder: Folder of the files, and of those that an interrupted process has left.
        dtype: Integer type of the ids.
        splits: Documents of each split, in the same order each time.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[np.unsignedinteger], splits: Mapping[str, Documents]
    ) -> None:
        self._folder, self._dtype, self._splits = folder, dtype, splits
        self._documents, self.tokens = dict.fromkeys(splits, 0), dict.fromkeys(splits, 0)
        if (progress := _read_progress(folder)) is not None:
            self._documents, self.tokens = progress["documents"], progress["tokens"]
        self._save()

    def write(self, encode: EncodeDocuments, show_tokens: Callable[[int], None]) -> None:
        """Write the ids of the documents that are not written yet.

        ``show_tokens`` is called with the number of tokens of all splits.
        """
        for split, documents in self._splits.items():
            path = self._folder / f"{split}.bin"
            with open(path, "ab") as file:
                written_bytes = self.tokens[split] * self._dtype.itemsize
                if os.path.getsize(path) < written_bytes:  # the machine was switched off
                    self._documents[split] = self.tokens[split] = written_bytes = 0
                file.truncate(written_bytes)
                file.seek(written_bytes)
                remaining = skip_documents(documents(), self._documents[split])
                for group in iter_groups(remaining):
                    tokens = 0
                    for ids in encode(group):
                        ids.astype(self._dtype).tofile(file)
                        tokens += len(ids)
                        show_tokens(sum(self.tokens.values()) + tokens)
                    file.flush()
                    self.tokens[split] += tokens
                    self._documents[split] += group.count
                    self._save()
        (self._folder / PROGRESS_FILE).unlink()

    def _save(self) -> None:
        path = self._folder / PROGRESS_FILE
        temporary_path = path.with_suffix(".new")
        progress = {"documents": self._documents, "tokens": self.tokens}
        temporary_path.write_text(json.dumps(progress), encoding="utf-8")
        temporary_path.replace(path)


class DocumentGroup:
    """Consecutive documents of an iterator, up to ``GROUP_CHARACTERS``; can be read once.

    Args:
        documents: Iterator of documents, which are read in order and each to its end.
        first: First document of the group.
    """

    def __init__(self, documents: Iterator[str | Document], first: str | Document) -> None:
        self.count = 0
        self._documents, self._next = documents, first
        self._characters = 0

    def __iter__(self) -> Iterator[str | Document]:
        document: str | Document | None = self._next
        while document is not None:
            if isinstance(document, str):
                self._characters += len(document)
                yield document
            else:
                yield Document(self._count_characters(document.chunks), document.source)
            self.count += 1
            if self._characters >= GROUP_CHARACTERS:
                return
            document = next(self._documents, None)

    def _count_characters(self, chunks: Iterable[str]) -> Iterator[str]:
        for chunk in chunks:
            self._characters += len(chunk)
            yield chunk


def iter_groups(documents: Iterator[str | Document]) -> Iterator[DocumentGroup]:
    """Yield the documents in groups, each of which is read before the next one."""
    while (first := next(documents, None)) is not None:
        yield DocumentGroup(documents, first)


def skip_documents(documents: Iterable[str | Document], count: int) -> Iterator[str | Document]:
    """Return an iterator over the documents after the first ``count``."""
    iterator = iter(documents)
    for _ in range(count):
        next(iterator, None)
    return iterator


def saved_tokens(folder: Path) -> int | None:
    """Return the number of tokens that an interrupted process has left in a folder.

    None if it has left nothing that can be continued.
    """
    progress = _read_progress(folder)
    return None if progress is None else sum(progress["tokens"].values())


def _read_progress(folder: Path) -> dict[str, dict[str, int]] | None:
    """Return the documents and tokens of each split that are written; None if none was begun."""
    path = folder / PROGRESS_FILE
    if not path.is_file():
        return None
    progress: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    return progress
