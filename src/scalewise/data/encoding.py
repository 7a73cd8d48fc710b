"""Documents to token ids in bounded memory, with the ids of encoding each document whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scalewise.data.chunked_encoding import encode_windows, open_document, split_chunks
from scalewise.data.text_files import Document
from scalewise.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from scalewise.data.tokenization import TokenizerSource

PART_TOKENS = 500_000
"""Token ids in one array that ``encode`` yields, at least."""

TRAINING_PIECE = 100_000
"""Characters of a document that a tokenizer is trained on at once; bounds the memory."""

LONGEST_WORD = 2_000_000
"""Characters without a space after which a word is cut in training."""

_CHOSEN = os.environ.get("TOKENIZERS_PARALLELISM")


def encode_documents(
    tokenizer: Tokenizer, tokenizer_source: TokenizerSource, documents: Iterable[str | Document]
) -> Iterator[NDArray[np.uint32]]:
    """Yields arrays of token ids which, joined, are the documents, each closed by end-of-text.

    Around a document stand the special tokens of the tokenizer's post-processor, if
    ``tokenizer_source`` asks for them; a document that ends in end-of-text gets no second one.
    Raises
    ``DataError`` for a document that the tokenizer cannot encode.
    """
    end = tokenizer.token_to_id(tokenizer_source.end_of_text)
    assert end is not None, "loading checks it"
    before, after = special_ids(tokenizer) if tokenizer_source.special_tokens else ([], [])
    part: list[int] = []
    first, latest = True, -1
    for ids, last in encode_windows(tokenizer, documents, tokenizer_source.tokenizer):
        added = [*before, *ids] if first else ids
        if last:
            added += after
        latest = added[-1] if added else -1 if first else latest
        part += added + [end] * (last and latest != end)
        first = last
        if len(part) >= PART_TOKENS:
            yield np.array(part, dtype=np.uint32)
            part = []
    if part:
        yield np.array(part, dtype=np.uint32)


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer's post-processor writes before and after a text."""
    if not tokenizer.num_special_tokens_to_add(False):
        return [], []
    for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        with suppress(Exception):  # the library raises nothing narrower
            encoding = tokenizer.encode(token)
            mask = encoding.special_tokens_mask
            if 0 in mask:
                first, last = mask.index(0), len(mask) - mask[::-1].index(0)
                return encoding.ids[:first], encoding.ids[last:]
    return [], []


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], sources: Sequence[str], path: str | None
) -> list[Encoding]:
    """Returns the encodings of texts without special tokens, made on every core.

    Raises ``DataError`` with the source of the first text that the tokenizer at ``path`` cannot
    encode.
    """
    try:
        with all_cores(), _silence_rust_panics():
            return list(tokenizer.encode_batch(list(texts), add_special_tokens=False))
    except BaseException as error:
        if not _is_tokenizer_error(error):
            raise
    for text, source in zip(texts, sources, strict=True):
        try:
            with _silence_rust_panics():
                tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not _is_tokenizer_error(error):
                raise
            reason = f"cannot encode {source}: {' '.join(str(error).split())}"
            fix = "mend the text, or give a tokenizer that encodes it"
            raise DataError.for_key("data.tokenizer", path, reason, fix) from error
    raise DataError.for_key("data.tokenizer", path, "cannot encode the texts", "give another")


def _is_tokenizer_error(error: BaseException) -> bool:
    """Returns whether an error is the library's: a panic in Rust is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def all_cores() -> Iterator[None]:
    """Tokenizes on all cores inside; after it a fork is safe and silent, unless the user chose."""
    os.environ["TOKENIZERS_PARALLELISM"] = _CHOSEN or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = _CHOSEN or "false"


@contextmanager
def _silence_rust_panics() -> Iterator[None]:
    """Discards what is printed on stderr inside: Rust prints panics before Python raises them."""
    try:
        own = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def iter_training_text(documents: Iterable[str | Document], characters: int) -> Iterator[str]:
    """Yields the first characters of documents in pieces whose words are those of the whole.

    A piece ends before the white space that follows a word, where byte-level pre-tokenization
    ends a word too.
    """
    for number, document in enumerate(documents, 1):
        text = ""
        for piece in split_chunks(open_document(document, number)[0], TRAINING_PIECE):
            text += piece[:characters]
            characters -= len(piece)
            if len(text) >= TRAINING_PIECE and (cut := _last_word_end(text)):
                yield text[:cut]
                text = text[cut:]
            if characters <= 0:
                break
        if text:
            yield text
        if characters <= 0:
            return


def _last_word_end(text: str) -> int:
    """Returns where the last word ends that white space follows; 0 where none does."""
    for space in ("\n", " "):
        at = text.rfind(space, 1)
        while at > 0:
            if not text[at - 1].isspace():
                return at
            at = text.rfind(space, 1, at)
    return len(text) if len(text) > LONGEST_WORD else 0
