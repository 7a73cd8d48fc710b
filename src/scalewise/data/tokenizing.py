"""Text to token ids: train or read a tokenizer, and encode documents one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.errors import Complaint, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

Documents = Callable[[], Iterator[str]]
"""Opens the documents from the first one."""

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end-of-text token."""

TRAINING_CHARACTERS = 64_000_000
"""A BPE is trained on the first characters of the training text: more would change it little."""

PART_TOKENS = 500_000
"""Token ids in one array that ``encode`` yields, at least."""

_CHOSEN = os.environ.get("TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class Tokenization:
    """Which tokenizer: a tokenizer.json, else a byte-level BPE of ``vocabulary`` tokens."""

    vocabulary: int
    tokenizer: str | None = None
    end_of_text: str = END_OF_TEXT

    def complaints(self) -> Iterator[Complaint]:
        """Yields what is wrong with the vocabulary, the tokenizer's path or the end of a text."""
        if not self.end_of_text:
            cure = f"give data.end_of_text='{END_OF_TEXT}'"
            yield Complaint("data.end_of_text", "", "is empty: texts have to end", cure)
        if self.tokenizer is None and self.vocabulary < SMALLEST_VOCABULARY:
            reason = "a byte-level tokenizer has 256 bytes and an end-of-text token"
            cure = f"give data.vocabulary={SMALLEST_VOCABULARY} or more"
            yield Complaint("data.vocabulary", self.vocabulary, reason, cure)
        if self.tokenizer is not None and not Path(self.tokenizer).expanduser().is_file():
            within = Path(self.tokenizer).expanduser() / "tokenizer.json"
            reason = "is a folder" if within.parent.is_dir() else "no such file"
            cure = "give the path of a tokenizer.json, or data.tokenizer=null to train one"
            if within.is_file():
                cure = f"set data.tokenizer={Path(self.tokenizer) / within.name}"
            yield Complaint("data.tokenizer", self.tokenizer, reason, cure)

    def identity(self) -> dict[str, object]:
        """Returns what decides the tokenizer, beside the text that it is trained on."""
        if self.tokenizer is None:
            return {"vocabulary": self.vocabulary, "end_of_text": self.end_of_text}
        path = Path(self.tokenizer).expanduser().resolve()
        state = path.stat()
        file = [str(path), state.st_size, state.st_mtime_ns]
        return {"tokenizer": file, "end_of_text": self.end_of_text}

    def load(self) -> Tokenizer | None:
        """Returns the user's tokenizer, None if one is to be trained; may raise ``DataError``."""
        if self.tokenizer is None:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(Path(self.tokenizer).expanduser()))
        except Exception as error:  # the library raises nothing narrower
            reason = f"is not a tokenizer.json ({error})"
            raise DataError.one("data.tokenizer", self.tokenizer, reason) from error
        if tokenizer.token_to_id(self.end_of_text) is None:
            reason = f"{self.tokenizer} has no such token to put between documents"
            cure = "give data.end_of_text='</s>', or what that tokenizer calls it"
            raise DataError.one("data.end_of_text", self.end_of_text, reason, cure)
        tokenizer.no_truncation()  # a tokenizer.json may hold the settings of one batch
        tokenizer.no_padding()
        return tokenizer

    def check(self, vocabulary: int) -> None:
        """Raises ``DataError`` for a tokenizer of more than ``vocabulary`` tokens, the model's."""
        loaded = self.load()
        needed = vocabulary_of(loaded) if loaded else self.vocabulary
        if needed > vocabulary:
            key, value = ("tokenizer", self.tokenizer) if loaded else ("vocabulary", needed)
            reason = f"makes ids up to {needed - 1}, but the model's vocabulary is {vocabulary}"
            cure = f"give model.vocabulary={needed}"
            raise DataError.one(f"data.{key}", value, reason, cure)

    def train(self, documents: Documents) -> Tokenizer:
        """Returns a byte-level BPE trained on the head of ``documents``; deterministic."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=[self.end_of_text],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with every_core():
            tokenizer.train_from_iterator(_head(documents()), trainer)
        return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id of a tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1


def encode(
    tokenizer: Tokenizer, end_of_text: str, documents: Iterable[str]
) -> Iterator[NDArray[np.uint32]]:
    """Yields arrays of token ids which, joined, are the documents, each closed by end-of-text."""
    import numpy as np

    from scalewise.data.chunked_encoding import encoded

    end = tokenizer.token_to_id(end_of_text)
    part: list[int | None] = []
    for ids, last in encoded(tokenizer, filter(None, documents)):
        part += ids
        part += [end] * last
        if len(part) >= PART_TOKENS:
            yield np.array(part, dtype=np.uint32)
            part = []
    if part:
        yield np.array(part, dtype=np.uint32)


def _head(documents: Iterator[str]) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for document in documents:
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return


@contextmanager
def every_core() -> Iterator[None]:
    """Tokenizes on all cores inside; after it a fork is safe and silent, unless the user chose."""
    os.environ["TOKENIZERS_PARALLELISM"] = _CHOSEN or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = _CHOSEN or "false"
