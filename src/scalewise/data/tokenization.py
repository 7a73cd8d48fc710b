"""Source of a tokenizer: a given tokenizer.json, or a byte-level BPE that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING

from scalewise.data import tokenizer_files
from scalewise.data.text_files import Document
from scalewise.errors import ConfigIssue, DataError
from scalewise.typed_override import format_override

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Documents = Callable[[], Iterator[str | Document]]
"""Function that iterates over the documents from the first one."""

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""

TRAINING_CHARACTERS = 64_000_000
"""Number of characters that a BPE is trained on; more text changes it little."""


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer.json, or a byte-level BPE of ``vocabulary`` tokens that is trained."""

    vocabulary: int
    """Vocabulary size of the trained BPE, in tokens."""
    tokenizer: str | None = None
    """Path of the given tokenizer; None: train one."""
    end_of_text: str = END_OF_TEXT
    """Token between documents."""
    special_tokens: bool = True
    """Whether documents get the special tokens of a given tokenizer's post-processor."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues of the vocabulary size, the tokenizer's path and the end-of-text token."""
        if not self.end_of_text:
            fix = f"set {format_override('data.end_of_text', END_OF_TEXT)}"
            yield ConfigIssue(
                "data.end_of_text", "", "is empty: a token has to separate documents", fix
            )
        if self.tokenizer is None and self.vocabulary < SMALLEST_VOCABULARY:
            reason = "is too small: a byte-level tokenizer has 256 bytes and an end-of-text token"
            fix = f"set data.vocabulary={SMALLEST_VOCABULARY} or more"
            yield ConfigIssue("data.vocabulary", self.vocabulary, reason, fix)
        if self.tokenizer is not None:
            yield from tokenizer_files.tokenizer_issues(self.tokenizer)

    def cache_identity(self) -> dict[str, object]:
        """Return the values that decide the tokenizer, besides its training text."""
        if self.tokenizer is None:
            return {"vocabulary": self.vocabulary, "end_of_text": self.end_of_text}
        return {
            "tokenizer": tokenizer_files.content_digest(self.tokenizer),
            "end_of_text": self.end_of_text,
            "special_tokens": self.special_tokens,
        }

    def load(self) -> Tokenizer | None:
        """Return the given tokenizer, or None to train one; may raise ``DataError``."""
        if self.tokenizer is None:
            return None
        file = tokenizer_files.resolve_tokenizer(self.tokenizer)
        tokenizer = tokenizer_files.load_tokenizer(self.tokenizer, file)
        if tokenizer.token_to_id(self.end_of_text) is None:
            reason = f"is not a token of {self.tokenizer}, which has to separate documents"
            override = format_override("data.end_of_text", "</s>")
            fix = f"set {override}, or the name of that token in the tokenizer"
            raise DataError.for_key("data.end_of_text", self.end_of_text, reason, fix)
        tokenizer.no_truncation()  # a tokenizer.json may hold the settings of one batch
        tokenizer.no_padding()
        return tokenizer

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise ``DataError`` for more tokens than ``vocabulary``, the model's vocabulary size."""
        tokenizer = self.load()
        size = vocabulary_size(tokenizer) if tokenizer else self.vocabulary
        if size <= vocabulary:
            return
        reason = f"has ids up to {size - 1}, but the model's vocabulary is {vocabulary}"
        fix = f"set model.vocabulary={size}"
        if tokenizer is None:
            raise DataError.for_key("data.vocabulary", size, reason, fix)
        excess_tokens = {it for it, token in tokenizer.get_vocab().items() if token >= vocabulary}
        if excess_tokens <= tokenizer_files.declared_tokens(str(self.tokenizer)):
            names = shorten(", ".join(sorted(excess_tokens)), 160, placeholder="...")
            reason += (
                f"; declared next to the tokenizer.json, beyond the model's embedding: {names}"
            )
            fix += " (for a transformers model: resize_token_embeddings); "
            fix += tokenizer_files.ignore_declarations_fix(str(self.tokenizer))
        raise DataError.for_key("data.tokenizer", self.tokenizer, reason, fix)

    def train(self, documents: Documents) -> Tokenizer:
        """Return a byte-level BPE, trained deterministically on the start of the documents."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        from scalewise.data.encoding import all_cores, iter_training_text

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=[self.end_of_text],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with all_cores():
            tokenizer.train_from_iterator(
                iter_training_text(documents(), TRAINING_CHARACTERS), trainer
            )
        return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id of a tokenizer plus one."""
    return max(tokenizer.get_vocab().values()) + 1
