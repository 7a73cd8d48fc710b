"""Token ids of long documents, encoded in overlapping windows.

Tokenizers work locally: the tokens of a window differ from those of the whole document only near
its ends, where words are cut or a SentencePiece tokenizer adds a boundary piece. Adjacent windows
are joined in the middle of the longest run of tokens that they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.data.tokenizing import every_core

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


@dataclass(frozen=True)
class Window:
    """The part of a document from ``start`` to ``stop``."""

    document: str
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the document ends with this window."""
        return self.stop == len(self.document)


def windows(document: str) -> Iterator[Window]:
    """Splits a document into windows that overlap by ``OVERLAP_CHARACTERS``."""
    start = 0
    while len(document) - start > WINDOW_CHARACTERS + OVERLAP_CHARACTERS:
        yield Window(document, start, start + WINDOW_CHARACTERS + OVERLAP_CHARACTERS)
        start += WINDOW_CHARACTERS
    yield Window(document, start, len(document))


def batches(documents: Iterable[str]) -> Iterator[list[Window]]:
    """Groups the windows of documents into batches of about ``BATCH_CHARACTERS``."""
    batch: list[Window] = []
    size = 0
    for document in documents:
        for window in windows(document):
            batch.append(window)
            size += window.stop - window.start
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encoded(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[list[int], bool]]:
    """Yields the ids of documents in parts, and whether a part is the last of its document.

    Windows that share no run of tokens, or only whitespace, are encoded with all that follows in
    their document.
    """
    pairs = (
        pair
        for batch in batches(documents)
        for pair in zip(batch, _encode_batch(tokenizer, batch), strict=True)
    )
    first = 0  # index of the first token of the encoding that was not yielded yet
    skipped = False
    previous: tuple[Window, Encoding] | None = None
    for window, encoding in pairs:
        if skipped:
            skipped = not window.last
            continue
        if previous is not None:
            shared = _shared_tokens(*previous, window, encoding)
            if shared is None:
                skipped = not window.last
                window = Window(window.document, previous[0].start, len(window.document))
                (encoding,) = _encode_batch(tokenizer, [window])
            else:
                yield previous[1].ids[first : shared[0]], False
                first = shared[1]
        if window.last:
            yield encoding.ids[first:], True
            first, previous = 0, None
        else:
            previous = window, encoding


def _encode_batch(tokenizer: Tokenizer, batch: list[Window]) -> list[Encoding]:
    texts = [window.document[window.start : window.stop] for window in batch]
    with every_core():
        return tokenizer.encode_batch(texts, add_special_tokens=False)


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
    middle = left_spans[left_end - length // 2][0]
    around = (left.document[right.start : middle], left.document[middle : left.stop])
    if not all(map(str.strip, around)):  # how whitespace is split may depend on what follows it
        return None
    return left_end - length // 2, right_end - length // 2


def _spans(window: Window, encoding: Encoding) -> list[tuple[int, int, int]]:
    """Position in the document and id of each token."""
    return [
        (window.start + start, window.start + stop, token)
        for (start, stop), token in zip(encoding.offsets, encoding.ids, strict=True)
    ]
