"""Encoding of texts on all cores, and training of a byte-level BPE."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from scalewise.data.text_files import Document, open_document, split_chunks
from scalewise.data.tokenizer import Documents, TokenizerSource
from scalewise.errors import DataError

TRAINING_CHARACTERS = 64_000_000
"""Number of characters that a BPE is trained on; more text changes it little."""

TRAINING_CHUNK_CHARACTERS = 100_000
"""Characters of a document that a tokenizer is trained on at once; bounds memory."""

MAX_WORD_CHARACTERS = 2_000_000
"""Characters without a space after which a word is split for training."""

_USER_PARALLELISM = os.environ.get("TOKENIZERS_PARALLELISM")


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer's post-processor adds before and after a text."""
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
    """Return the encodings of texts without special tokens, computed on all cores.

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
            fix = "correct the text, or use a tokenizer that encodes it"
            raise DataError.for_key("data.tokenizer", path, reason, fix) from error
    raise DataError.for_key(
        "data.tokenizer", path, "cannot encode the texts", "use another tokenizer"
    )


def _is_tokenizer_error(error: BaseException) -> bool:
    """Whether an error comes from the library: a Rust panic is not an ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def all_cores() -> Iterator[None]:
    """Tokenize on all cores inside the context; afterwards a fork is safe and prints no warning.

    A user's ``TOKENIZERS_PARALLELISM`` takes precedence.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = _USER_PARALLELISM or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = _USER_PARALLELISM or "false"


@contextmanager
def _silence_rust_panics() -> Iterator[None]:
    """Discard output on stderr: Rust prints panics before Python raises them."""
    try:
        stderr_copy = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    os.close(null_device)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def train_tokenizer(source: TokenizerSource, documents: Documents) -> Tokenizer:
    """Return a byte-level BPE, trained deterministically on the start of the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=source.vocabulary,
        special_tokens=[source.end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with all_cores():
        tokenizer.train_from_iterator(iter_training_text(documents(), TRAINING_CHARACTERS), trainer)
    return tokenizer


def iter_training_text(documents: Iterable[str | Document], characters: int) -> Iterator[str]:
    """Yield the first characters of documents in chunks that split no word.

    A chunk ends before white space that follows a word, where byte-level pre-tokenization also ends
    a word.
    """
    for number, document in enumerate(documents, 1):
        text = ""
        for chunk in split_chunks(open_document(document, number)[0], TRAINING_CHUNK_CHARACTERS):
            text += chunk[:characters]
            characters -= len(chunk)
            if len(text) >= TRAINING_CHUNK_CHARACTERS and (word_end := _last_word_end(text)):
                yield text[:word_end]
                text = text[word_end:]
            if characters <= 0:
                break
        if text:
            yield text
        if characters <= 0:
            return


def _last_word_end(text: str) -> int:
    """Return the end of the last word that white space follows; 0 if there is none."""
    for space in ("\n", " "):
        position = text.rfind(space, 1)
        while position > 0:
            if not text[position - 1].isspace():
                return position
            position = text.rfind(space, 1, position)
    return len(text) if len(text) > MAX_WORD_CHARACTERS else 0
