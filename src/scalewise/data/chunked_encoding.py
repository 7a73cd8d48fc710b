"""Token ids of long documents, encoded in overlapping windows.

The tokens of a window differ from those of the whole document near its ends, where words are cut or
a SentencePiece tokenizer adds a boundary piece, and beyond: a pre-tokenizer that groups digits by
three counts from the first of them. Adjacent windows are joined within the longest run of tokens
that they share, and only where the tokens after it are known to be those of the whole document:

- Pre-tokenizers go through a text from left to right. A place where the first of them begins a
  piece in both windows is one where it begins anew, and the later ones within the piece.
- A BPE that is not pre-tokenized: its tokens are determined by adjacent pairs, each of which is in
  one of the windows.

Of two windows without such a place the later is encoded again from where a piece of the earlier
begins; if that gives none, they are encoded as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalewise.data.text_files import Document, print_note_once

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

WINDOW_CHARACTERS = 250_000
"""A longer document is encoded in windows, on every core."""
OVERLAP_CHARACTERS = 4_096
"""Characters that adjacent windows share."""
SHARED_TOKENS = 32
"""Equal consecutive tokens in the overlap that two windows need to be joined."""
BATCH_CHARACTERS = 2_000_000
"""Characters that are encoded at once; limits memory."""
BATCH_WINDOWS = 10_000
"""Windows that are encoded at once; limits memory where they are short."""
LONGEST_WINDOW = 8_000_000
"""Characters up to which windows that share too few tokens are encoded as one; limits memory."""


@dataclass(frozen=True)
class Window:
    """A part of a document, ``source``, that begins at its character ``start``."""

    text: str
    start: int
    is_last: bool
    source: str

    @property
    def stop(self) -> int:
        """Character of the document at which the window ends."""
        return self.start + len(self.text)


def split_windows(document: str | Document, number: int = 1) -> Iterator[Window]:
    """Splits a document into windows that overlap by ``OVERLAP_CHARACTERS``."""
    chunks, source = open_document(document, number)
    start, text = 0, ""
    longest = WINDOW_CHARACTERS + OVERLAP_CHARACTERS
    for piece in split_chunks(chunks, WINDOW_CHARACTERS):
        text += piece
        while len(text) > longest:
            yield Window(text[:longest], start, False, source)
            start, text = start + WINDOW_CHARACTERS, text[WINDOW_CHARACTERS:]
    if text:
        yield Window(text, start, True, source)


def open_document(document: str | Document, number: int) -> tuple[Iterable[str], str]:
    """Chunks of a document, and its name in error messages."""
    if isinstance(document, Document):
        return document.chunks, document.source
    return (document,), f"text {number}"


def split_chunks(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Splits chunks into pieces of at most ``size`` characters."""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]


def batch_windows(documents: Iterable[str | Document]) -> Iterator[list[Window]]:
    """Groups the windows of documents into batches of about ``BATCH_CHARACTERS``."""
    batch: list[Window] = []
    size = 0
    for number, document in enumerate(documents, 1):
        for window in split_windows(document, number):
            batch.append(window)
            size += len(window.text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_WINDOWS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode_windows(
    tokenizer: Tokenizer, documents: Iterable[str | Document], path: str | None = None
) -> Iterator[tuple[list[int], bool]]:
    """Yields the ids of documents in parts, and whether a part is the last of its document.

    Documents without text yield nothing. Windows that cannot be joined are encoded as one, up to
    ``LONGEST_WINDOW``; beyond it the earlier one is closed as a text, with a note. Raises
    ``DataError`` for a document that the tokenizer at ``path`` cannot encode.
    """
    encode = _Encoder(tokenizer, path)
    first = 0  # index of the first token of the encoding that was not yielded yet
    left: _Encoded | None = None
    for right in (it for batch in batch_windows(documents) for it in encode(batch)):
        if left is not None:
            shared = encode.shared_tokens(left, right)
            if shared is None and (aligned := _align_windows(left, right.window)):
                (again,) = encode([aligned])
                shared = encode.shared_tokens(left, again)
                right = right if shared is None else again
            if shared is not None:
                yield left.encoding.ids[first : shared[0]], False
                first = shared[1]
            else:
                window = right.window
                rest = window.text[left.window.stop - window.start :]
                if len(left.window.text) + len(rest) <= LONGEST_WINDOW:
                    text, start = left.window.text + rest, left.window.start
                else:
                    print_note_once(
                        f"{window.source} is encoded in parts of up to {LONGEST_WINDOW:,} "
                        "characters: no place in it begins a word whatever stands before it"
                    )
                    yield left.encoding.ids[first:], False
                    first, text, start = 0, rest, left.window.stop
                (right,) = encode([Window(text, start, window.is_last, window.source)])
        if right.window.is_last:
            yield right.encoding.ids[first:], True
            first, left = 0, None
        else:
            left = right


def _align_windows(left: _Encoded, window: Window) -> Window | None:
    """Returns the part of a window that begins where a piece of the window before it does."""
    begin = min((it for it in left.pieces if window.start < it < left.window.stop), default=None)
    if begin is None:
        return None
    return Window(window.text[begin - window.start :], begin, window.is_last, window.source)


@dataclass(frozen=True)
class _Encoded:
    """A window, its tokens, and the characters of the document where pieces begin in it."""

    window: Window
    encoding: Encoding
    pieces: frozenset[int]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Position in the document and id of each token."""
        begin = self.window.start
        return [
            (begin + start, begin + stop, token)
            for (start, stop), token in zip(self.encoding.offsets, self.encoding.ids, strict=True)
        ]


class _Encoder:
    """Encodes windows, and finds where two of them can be joined."""

    def __init__(self, tokenizer: Tokenizer, path: str | None) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._piece_tokenizer = piece_tokenizer(tokenizer)
        self._is_unsplit_bpe = self._piece_tokenizer is None and _is_bpe(tokenizer)

    def __call__(self, batch: list[Window]) -> list[_Encoded]:
        """Encodes windows on every core."""
        encodings = _encode_batch(self._tokenizer, batch, self._path)
        parts = [it for it in batch if it.start or not it.is_last]
        pieces = dict.fromkeys(batch, frozenset[int]())
        if self._piece_tokenizer is not None and parts:
            for window, found in zip(
                parts, _encode_batch(self._piece_tokenizer, parts, self._path), strict=True
            ):
                pieces[window] = frozenset(window.start + start for start, _ in found.offsets)
        return [
            _Encoded(window, encoding, pieces[window])
            for window, encoding in zip(batch, encodings, strict=True)
        ]

    def shared_tokens(self, left: _Encoded, right: _Encoded) -> tuple[int, int] | None:
        """Middle of the longest run of equal tokens in the overlap: its index in each encoding.

        None where the tokens after it are not known to be those of the document.
        """
        begin, end = right.window.start, left.window.stop
        left_spans, right_spans = left.spans, right.spans
        index_of = {span: index for index, span in enumerate(left_spans) if span[0] >= begin}
        longest = (0, 0, 0)  # tokens, and one past the last of them in each encoding
        length, last = 0, -2
        for index, span in enumerate(right_spans):
            if span[0] >= end:
                break
            found = index_of.get(span, -2)
            length = length + 1 if found == last + 1 else int(found >= 0)
            last = found
            longest = max(longest, (length, found + 1, index + 1))
        length, left_end, right_end = longest
        if length < SHARED_TOKENS:
            return None
        run = range(left_spans[left_end - length][0] + 1, left_spans[left_end - 1][1])
        if not self._is_unsplit_bpe and not any(it in run for it in left.pieces & right.pieces):
            return None
        middle = left_spans[left_end - length // 2][0]
        around = (right.window.text[: middle - begin], left.window.text[middle - end :])
        if not all(map(str.strip, around)):  # how whitespace is split may depend on what follows it
            return None
        return left_end - length // 2, right_end - length // 2


def piece_tokenizer(tokenizer: Tokenizer) -> Tokenizer | None:
    """Returns a tokenizer whose tokens are the pieces of the first pre-tokenizer that splits.

    None where none does.
    """
    from tokenizers import Tokenizer

    if tokenizer.pre_tokenizer is None:
        return None
    stages = list(_stages(json.loads(tokenizer.pre_tokenizer.__getstate__())))
    splitting = next((index for index, stage in enumerate(stages) if _splits_text(stage)), None)
    if splitting is None:
        return None
    normalizer = tokenizer.normalizer and json.loads(tokenizer.normalizer.__getstate__())
    pieces = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": normalizer,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages[: splitting + 1]},
                "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
            }
        )
    )
    added = tokenizer.get_added_tokens_decoder().values()
    pieces.add_special_tokens([token for token in added if token.special])
    pieces.add_tokens([token for token in added if not token.special])
    return pieces


def _stages(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the pre-tokenizers of a sequence in their order."""
    if stage["type"] == "Sequence":
        for part in stage["pretokenizers"]:
            yield from _stages(part)
    else:
        yield stage


def _splits_text(stage: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer does more than to replace characters."""
    option = {"ByteLevel": "use_regex", "Metaspace": "split"}.get(stage["type"])
    return option is None or stage.get(option, True)


def _is_bpe(tokenizer: Tokenizer) -> bool:
    """Returns whether the model is a BPE whose merges are not dropped at random."""
    from tokenizers import models

    model = tokenizer.model
    return isinstance(model, models.BPE) and not model.dropout


def _encode_batch(tokenizer: Tokenizer, batch: list[Window], path: str | None) -> list[Encoding]:
    from scalewise.data.encoding import encode_texts

    return encode_texts(tokenizer, [it.text for it in batch], [it.source for it in batch], path)
