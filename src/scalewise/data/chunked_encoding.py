"""Token ids of long documents, encoded in overlapping windows.

Tokenizers work locally: the tokens of a window differ from those of the whole document only near
its ends, where words are cut or a SentencePiece tokenizer adds a boundary piece. Adjacent windows
are joined in the middle of the longest run of tokens that they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.data.reading import Document

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
    last: bool
    source: str

    @property
    def stop(self) -> int:
        """Character of the document at which the window ends."""
        return self.start + len(self.text)


def windows(document: str | Document, number: int = 1) -> Iterator[Window]:
    """Splits a document into windows that overlap by ``OVERLAP_CHARACTERS``."""
    chunks, source = opened(document, number)
    start, text = 0, ""
    longest = WINDOW_CHARACTERS + OVERLAP_CHARACTERS
    for piece in pieces(chunks, WINDOW_CHARACTERS):
        text += piece
        while len(text) > longest:
            yield Window(text[:longest], start, False, source)
            start, text = start + WINDOW_CHARACTERS, text[WINDOW_CHARACTERS:]
    if text:
        yield Window(text, start, True, source)


def opened(document: str | Document, number: int) -> tuple[Iterable[str], str]:
    """Chunks of a document, and its name in error messages."""
    if isinstance(document, Document):
        return document.chunks, document.source
    return (document,), f"text {number}"


def pieces(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Splits chunks into pieces of at most ``size`` characters."""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]


def batches(documents: Iterable[str | Document]) -> Iterator[list[Window]]:
    """Groups the windows of documents into batches of about ``BATCH_CHARACTERS``."""
    batch: list[Window] = []
    size = 0
    for number, document in enumerate(documents, 1):
        for window in windows(document, number):
            batch.append(window)
            size += len(window.text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_WINDOWS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encoded(
    tokenizer: Tokenizer, documents: Iterable[str | Document], path: str | None = None
) -> Iterator[tuple[list[int], bool]]:
    """Yields the ids of documents in parts, and whether a part is the last of its document.

    Documents without text yield nothing. Windows that share no run of tokens, or only whitespace,
    are encoded as one window, up to ``LONGEST_WINDOW``; beyond it the earlier one is closed as a
    text. Raises ``DataError`` for a document that the tokenizer at ``path`` cannot encode.
    """
    pairs = (
        pair
        for batch in batches(documents)
        for pair in zip(batch, _encode_batch(tokenizer, batch, path), strict=True)
    )
    first = 0  # index of the first token of the encoding that was not yielded yet
    previous: tuple[Window, Encoding] | None = None
    for window, encoding in pairs:
        if previous is not None:
            left, left_encoding = previous
            shared = _shared_tokens(left, left_encoding, window, encoding)
            if shared is not None:
                yield left_encoding.ids[first : shared[0]], False
                first = shared[1]
            else:
                rest = window.text[left.stop - window.start :]
                if len(left.text) + len(rest) <= LONGEST_WINDOW:
                    window = Window(left.text + rest, left.start, window.last, window.source)
                else:
                    yield left_encoding.ids[first:], False
                    first = 0
                    window = Window(rest, left.stop, window.last, window.source)
                (encoding,) = _encode_batch(tokenizer, [window], path)
        if window.last:
            yield encoding.ids[first:], True
            first, previous = 0, None
        else:
            previous = window, encoding


def _encode_batch(tokenizer: Tokenizer, batch: list[Window], path: str | None) -> list[Encoding]:
    from scalewise.data.encoding import encode_texts

    return encode_texts(tokenizer, [it.text for it in batch], [it.source for it in batch], path)


def _shared_tokens(
    left: Window, left_encoding: Encoding, right: Window, right_encoding: Encoding
) -> tuple[int, int] | None:
    """Middle of the longest run of equal tokens in the overlap: its index in each encoding."""
    left_spans, right_spans = _spans(left, left_encoding), _spans(right, right_encoding)
    index_of = {span: index for index, span in enumerate(left_spans) if span[0] >= right.start}
    longest = (0, 0, 0)  # tokens, and one past the last of them in each encoding
    length, last = 0, -2
    for index, span in enumerate(right_spans):
        if span[0] >= left.stop:
            break
        found = index_of.get(span, -2)
        length = length + 1 if found == last + 1 else int(found >= 0)
        last = found
        longest = max(longest, (length, found + 1, index + 1))
    length, left_end, right_end = longest
    if length < SHARED_TOKENS:
        return None
    middle = left_spans[left_end - length // 2][0] - right.start
    around = (right.text[:middle], right.text[middle : left.stop - right.start])
    if not all(map(str.strip, around)):  # how whitespace is split may depend on what follows it
        return None
    return left_end - length // 2, right_end - length // 2


def _spans(window: Window, encoding: Encoding) -> list[tuple[int, int, int]]:
    """Position in the document and id of each token."""
    return [
        (window.start + start, window.start + stop, token)
        for (start, stop), token in zip(encoding.offsets, encoding.ids, strict=True)
    ]
