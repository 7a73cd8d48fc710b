"""Text to token ids: train or read a tokenizer, and encode documents one after the other."""

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
"""Opens the documents from the first one."""

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end-of-text token."""

TRAINING_CHARACTERS = 64_000_000
"""A BPE is trained on the first characters of the training text: more would change it little."""


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer: a tokenizer.json, else a byte-level BPE of ``vocabulary`` tokens."""

    vocabulary: int
    tokenizer: str | None = None
    end_of_text: str = END_OF_TEXT
    special_tokens: bool = True
    """Whether documents get the special tokens of a given tokenizer's post-processor."""

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields what is wrong with the vocabulary, the tokenizer's path or the end of a text."""
        if not self.end_of_text:
            fix = f"give {format_override('data.end_of_text', END_OF_TEXT)}"
            yield ConfigIssue("data.end_of_text", "", "is empty: texts have to end", fix)
        if self.tokenizer is None and self.vocabulary < SMALLEST_VOCABULARY:
            reason = "a byte-level tokenizer has 256 bytes and an end-of-text token"
            fix = f"give data.vocabulary={SMALLEST_VOCABULARY} or more"
            yield ConfigIssue("data.vocabulary", self.vocabulary, reason, fix)
        if self.tokenizer is not None:
            yield from tokenizer_files.tokenizer_issues(self.tokenizer)

    def cache_identity(self) -> dict[str, object]:
        """Returns what decides the tokenizer, beside the text that it is trained on."""
        if self.tokenizer is None:
            return {"vocabulary": self.vocabulary, "end_of_text": self.end_of_text}
        return {
            "tokenizer": tokenizer_files.content_digest(self.tokenizer),
            "end_of_text": self.end_of_text,
            "special_tokens": self.special_tokens,
        }

    def load(self) -> Tokenizer | None:
        """Returns the user's tokenizer, None if one is to be trained; may raise ``DataError``."""
        if self.tokenizer is None:
            return None
        file = tokenizer_files.resolve_tokenizer(self.tokenizer)
        tokenizer = tokenizer_files.load_tokenizer(self.tokenizer, file)
        if tokenizer.token_to_id(self.end_of_text) is None:
            reason = f"{self.tokenizer} has no such token to put between documents"
            given = format_override("data.end_of_text", "</s>")
            fix = f"give {given}, or what that tokenizer calls it"
            raise DataError.for_key("data.end_of_text", self.end_of_text, reason, fix)
        tokenizer.no_truncation()  # a tokenizer.json may hold the settings of one batch
        tokenizer.no_padding()
        return tokenizer

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises ``DataError`` for a tokenizer of more than ``vocabulary`` tokens, the model's."""
        loaded = self.load()
        needed = vocabulary_size(loaded) if loaded else self.vocabulary
        if needed <= vocabulary:
            return
        reason = f"makes ids up to {needed - 1}, but the model's vocabulary is {vocabulary}"
        fix = f"give model.vocabulary={needed}"
        if loaded is None:
            raise DataError.for_key("data.vocabulary", needed, reason, fix)
        past = {it for it, token in loaded.get_vocab().items() if token >= vocabulary}
        if past <= tokenizer_files.declared_tokens(str(self.tokenizer)):
            names = shorten(", ".join(sorted(past)), 160, placeholder="...")
            reason += f"; declared beside the tokenizer.json, past the model's rows: {names}"
            fix += " (resize_token_embeddings for a model of transformers); "
            fix += tokenizer_files.ignore_declarations_fix(str(self.tokenizer))
        raise DataError.for_key("data.tokenizer", self.tokenizer, reason, fix)

    def train(self, documents: Documents) -> Tokenizer:
        """Returns a byte-level BPE trained on the head of ``documents``; deterministic."""
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
    """Returns one more than the largest id of a tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1
