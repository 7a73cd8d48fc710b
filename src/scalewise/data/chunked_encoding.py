"""Encoding of documents in bounded memory, identical to encoding each one at once.

Long documents are encoded in overlapping windows.

The tokens of a window differ from those of the whole document near its ends, where words are split
or a SentencePiece tokenizer adds a boundary token. They may also differ further inside: a
pre-tokenizer that groups digits by three counts from the first digit. Adjacent windows are joined
within their longest run of common tokens, and only where the tokens after it are provably those of
the whole document:

- Pre-tokenizers process a text from left to right. If the first pre-tokenizer begins a word at the
  same position in both windows, it continues equally from there, and so do later pre-tokenizers.
- The tokens of a BPE without a pre-tokenizer are determined by adjacent pairs, each of which is in
  one of the windows.

If two windows have no such position, the second is encoded again from the start of a word of the
first. If that also fails, both are encoded as one window.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, models

from scalewise.data.encoding import encode_texts, special_ids
from scalewise.data.text_files import Document, open_document, split_chunks, warn_once
from scalewise.data.tokenizer import TokenizerSource

PART_TOKENS = 500_000
"""Minimum number of token ids in one array of ``encode_documents``."""
WINDOW_CHARACTERS = 250_000
"""Length of a window; longer documents are encoded in windows, on all cores."""
OVERLAP_CHARACTERS = 4_096
"""Characters that adjacent windows have in common."""
SHARED_TOKENS = 32
"""Minimum number of equal consecutive tokens in the overlap of two joined windows."""
BATCH_CHARACTERS = 2_000_000
"""Characters that are encoded at once; bounds memory."""
BATCH_WINDOWS = 10_000
"""Windows that are encoded at once; bounds memory for short windows."""
MAX_WINDOW_CHARACTERS = 8_000_000
"""Length up to which windows that cannot be joined are encoded as one; bounds memory."""


@dataclass(frozen=True)
class Window:
    """Part of a document."""

    text: str
    """Text of the window."""
    start: int
    """Position of its first character in the document."""
    is_last: bool
    """Whether the document ends with it."""
    source: str
    """Name of the document in error messages."""

    @property
    def stop(self) -> int:
        """Position in the document at which the window ends."""
        return self.start + len(self.text)


def split_windows(document: str | Document, number: int = 1) -> Iterator[Window]:
    """Split a document into windows that overlap by ``OVERLAP_CHARACTERS``."""
    chunks, source = open_document(document, number)
    start, text = 0, ""
    max_length = WINDOW_CHARACTERS + OVERLAP_CHARACTERS
    for chunk in split_chunks(chunks, WINDOW_CHARACTERS):
        text += chunk
        while len(text) > max_length:
            yield Window(text[:max_length], start, False, source)
            start, text = start + WINDOW_CHARACTERS, text[WINDOW_CHARACTERS:]
    if text:
        yield Window(text, start, True, source)


def batch_windows(documents: Iterable[str | Document]) -> Iterator[list[Window]]:
    """Group the windows of documents into batches of about ``BATCH_CHARACTERS``."""
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


def encode_documents(
    tokenizer: Tokenizer, tokenizer_source: TokenizerSource, documents: Iterable[str | Document]
) -> Iterator[NDArray[np.uint32]]:
    """Yield arrays of token ids: the concatenated documents, each followed by end-of-text.

    If ``tokenizer_source.special_tokens`` is set, each document gets the special tokens of the
    tokenizer's post-processor; a document that already ends in end-of-text gets no second one.
    Raises ``DataError`` for a document that the tokenizer cannot encode.
    """
    end_id = tokenizer.token_to_id(tokenizer_source.end_of_text)
    assert end_id is not None, "checked by TokenizerSource.load"
    prefix_ids, suffix_ids = special_ids(tokenizer) if tokenizer_source.special_tokens else ([], [])
    part: list[int] = []
    is_first, last_id = True, -1
    for ids, is_last in encode_windows(tokenizer, documents, tokenizer_source.tokenizer):
        document_ids = [*prefix_ids, *ids] if is_first else ids
        if is_last:
            document_ids += suffix_ids
        last_id = document_ids[-1] if document_ids else -1 if is_first else last_id
        part += document_ids + [end_id] * (is_last and last_id != end_id)
        is_first = is_last
        if len(part) >= PART_TOKENS:
            yield np.array(part, dtype=np.uint32)
            part = []
    if part:
        yield np.array(part, dtype=np.uint32)


def encode_windows(
    tokenizer: Tokenizer, documents: Iterable[str | Document], path: str | None = None
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of documents in parts, and whether a part is the last of its document.

    Documents without text yield nothing. Windows that cannot be joined are encoded as one, up to
    ``MAX_WINDOW_CHARACTERS``; beyond that, the first one ends as if it were a document, with a
    note. Raises ``DataError`` for a document that the tokenizer at ``path`` cannot encode.
    """
    encoder = _Encoder(tokenizer, path)
    first = 0  # index of the first token of the encoding that is not yielded yet
    previous: _Encoded | None = None
    for current in (it for batch in batch_windows(documents) for it in encoder(batch)):
        if previous is not None:
            join = encoder.shared_tokens(previous, current)
            if join is None and (aligned_window := _align_windows(previous, current.window)):
                (realigned,) = encoder([aligned_window])
                join = encoder.shared_tokens(previous, realigned)
                current = current if join is None else realigned
            if join is not None:
                yield previous.encoding.ids[first : join[0]], False
                first = join[1]
            else:
                window = current.window
                remaining_text = window.text[previous.window.stop - window.start :]
                if len(previous.window.text) + len(remaining_text) <= MAX_WINDOW_CHARACTERS:
                    text, start = previous.window.text + remaining_text, previous.window.start
                else:
                    warn_once(
                        f"{window.source} is encoded in parts of up to {MAX_WINDOW_CHARACTERS:,} "
                        "characters: no position starts a word independently of the text before it"
                    )
                    yield previous.encoding.ids[first:], False
                    first, text, start = 0, remaining_text, previous.window.stop
                (current,) = encoder([Window(text, start, window.is_last, window.source)])
        if current.window.is_last:
            yield current.encoding.ids[first:], True
            first, previous = 0, None
        else:
            previous = current


def _align_windows(previous: _Encoded, window: Window) -> Window | None:
    """Return the part of a window from the first start of a word of the previous window."""
    word_start = min(
        (it for it in previous.word_starts if window.start < it < previous.window.stop),
        default=None,
    )
    if word_start is None:
        return None
    return Window(
        window.text[word_start - window.start :], word_start, window.is_last, window.source
    )


@dataclass(frozen=True)
class _Encoded:
    """A window with its tokens and the positions in the document where words begin."""

    window: Window
    encoding: Encoding
    word_starts: frozenset[int]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Positions in the document and id of each token."""
        offset = self.window.start
        return [
            (offset + start, offset + stop, token)
            for (start, stop), token in zip(self.encoding.offsets, self.encoding.ids, strict=True)
        ]


class _Encoder:
    """Encoder of windows that also finds the position where two of them can be joined."""

    def __init__(self, tokenizer: Tokenizer, path: str | None) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._word_tokenizer = word_tokenizer(tokenizer)
        self._is_unsplit_bpe = self._word_tokenizer is None and _is_bpe(tokenizer)

    def __call__(self, batch: list[Window]) -> list[_Encoded]:
        """Encode windows on all cores."""
        encodings = _encode_batch(self._tokenizer, batch, self._path)
        partial_windows = [it for it in batch if it.start or not it.is_last]
        word_starts = dict.fromkeys(batch, frozenset[int]())
        if self._word_tokenizer is not None and partial_windows:
            for window, words in zip(
                partial_windows,
                _encode_batch(self._word_tokenizer, partial_windows, self._path),
                strict=True,
            ):
                word_starts[window] = frozenset(window.start + start for start, _ in words.offsets)
        return [
            _Encoded(window, encoding, word_starts[window])
            for window, encoding in zip(batch, encodings, strict=True)
        ]

    def shared_tokens(self, left: _Encoded, right: _Encoded) -> tuple[int, int] | None:
        """Return the middle of the longest run of equal tokens: its index in each encoding.

        None if the tokens after it may differ from those of the document.
        """
        overlap_start, overlap_stop = right.window.start, left.window.stop
        left_spans, right_spans = left.spans, right.spans
        index_of = {
            span: index for index, span in enumerate(left_spans) if span[0] >= overlap_start
        }
        longest = (0, 0, 0)  # number of tokens, and the index after the last one in each encoding
        length, last_index = 0, -2
        for index, span in enumerate(right_spans):
            if span[0] >= overlap_stop:
                break
            left_index = index_of.get(span, -2)
            length = length + 1 if left_index == last_index + 1 else int(left_index >= 0)
            last_index = left_index
            longest = max(longest, (length, left_index + 1, index + 1))
        length, left_end, right_end = longest
        if length < SHARED_TOKENS:
            return None
        run = range(left_spans[left_end - length][0] + 1, left_spans[left_end - 1][1])
        if not self._is_unsplit_bpe and not any(
            it in run for it in left.word_starts & right.word_starts
        ):
            return None
        middle = left_spans[left_end - length // 2][0]
        overlap_texts = (
            right.window.text[: middle - overlap_start],
            left.window.text[middle - overlap_stop :],
        )
        if not all(
            map(str.strip, overlap_texts)
        ):  # splitting of whitespace may depend on the text after it
            return None
        return left_end - length // 2, right_end - length // 2


def word_tokenizer(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return a tokenizer whose tokens are the words of the first pre-tokenizer that splits.

    None if no pre-tokenizer splits.
    """
    if tokenizer.pre_tokenizer is None:
        return None
    stages = list(_stages(json.loads(tokenizer.pre_tokenizer.__getstate__())))
    splitting = next((index for index, stage in enumerate(stages) if _splits_text(stage)), None)
    if splitting is None:
        return None
    normalizer = tokenizer.normalizer and json.loads(tokenizer.normalizer.__getstate__())
    words = Tokenizer.from_str(
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
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    words.add_special_tokens([token for token in added_tokens if token.special])
    words.add_tokens([token for token in added_tokens if not token.special])
    return words


def _stages(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pre-tokenizers of a sequence in order."""
    if stage["type"] == "Sequence":
        for part in stage["pretokenizers"]:
            yield from _stages(part)
    else:
        yield stage


def _splits_text(stage: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer splits text instead of only replacing characters."""
    option = {"ByteLevel": "use_regex", "Metaspace": "split"}.get(stage["type"])
    return option is None or stage.get(option, True)


def _is_bpe(tokenizer: Tokenizer) -> bool:
    """Whether the model is a BPE without dropout of merges."""
    model = tokenizer.model
    return isinstance(model, models.BPE) and not model.dropout


def _encode_batch(tokenizer: Tokenizer, batch: list[Window], path: str | None) -> list[Encoding]:
    return encode_texts(tokenizer, [it.text for it in batch], [it.source for it in batch], path)
