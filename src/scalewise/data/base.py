"""Base class of data options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from scalewise.data.tokenizer import TokenizerSource
from scalewise.errors import ConfigIssue
from scalewise.typed_override import format_override


class DataConfig(ABC):
    """Options of a data source."""

    sequence: int
    """Sequence length, in tokens."""
    pairs: bool = False
    """Whether a sample consists of two sequences, the preferred one first."""
    packing: bool = False
    """Whether a sequence contains several texts, with separated attention."""
    target_length: int = 0
    """Number of decoder tokens at the end of a sample, after the encoder's; 0: one model reads all
    tokens."""
    image_size: int = 0
    """Side of the images that captions describe, in pixels; 0: no images."""
    classes: tuple[str, ...] = ()
    """Class names, for data whose samples have a class index as their only label."""
    is_user_defined = False
    """Whether batches of any kind come from user-defined data loaders."""
    implementation: ClassVar[str] = ""
    """Module that registers a function of ``prepare_splits`` for the class."""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the texts, since none is given."""
        return False

    @property
    def is_continuous_text(self) -> bool:
        """Whether any part of a sequence can be trained on alone, as of running text."""
        return True

    @property
    def answer_length(self) -> int:
        """Number of verifiable answer tokens at the end of each sample; 0: none."""
        return 0

    @property
    @abstractmethod
    def required_vocabulary(self) -> int | None:
        """Largest token id plus one; None if the data decide it."""

    @abstractmethod
    def validate(self) -> Iterator[ConfigIssue]:
        """Yield the issues that are visible without reading the data, such as absent files."""

    def target_length_issue(self) -> ConfigIssue:
        """Return the issue of a ``target_length`` that leaves no tokens for the encoder."""
        reason = (
            f"must be positive and below data.sequence={self.sequence}: the encoder reads the rest"
        )
        fix = f"set data.target_length={max(1, self.sequence // 4)}"
        return ConfigIssue("data.target_length", self.target_length, reason, fix)

    def non_positive_issues(self, *fields: str) -> Iterator[ConfigIssue]:
        """Yield an issue for each of the named fields that is zero or less."""
        for field in fields:
            value, default = getattr(self, field), getattr(type(self), field)
            if value <= 0:
                key = f"data.{field}"
                yield ConfigIssue(
                    key, value, "must be positive", f"set {format_override(key, default)}"
                )


class TokenizedDataConfig(DataConfig):
    """Options of texts that a given or trained tokenizer encodes."""

    tokenizer: str | None
    """Path of the given tokenizer; None: train one."""
    vocabulary: int
    """Vocabulary size of the trained BPE, in tokens."""
    end_of_text: str
    """Token between documents."""
    special_tokens: bool = True
    """Whether documents get the special tokens of a given tokenizer's post-processor."""
    validation_fraction: float = 0.0
    """Fraction of the texts that is held out for validation."""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the texts, since none is given."""
        return self.tokenizer is None

    @property
    def required_vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer that is trained; None with a given one."""
        return self.vocabulary if self.trains_tokenizer else None

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Tokenizer of the texts."""
        return TokenizerSource(
            self.vocabulary, self.tokenizer, self.end_of_text, self.special_tokens
        )

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield issues of the sequence length, the tokenizer and the validation fraction."""
        yield from self.non_positive_issues("sequence")
        yield from self.tokenizer_source.validate()
        if not 0 <= self.validation_fraction < 1:
            reason = "must be at least 0 and below 1"
            fix = "set data.validation_fraction=0.05"
            yield ConfigIssue("data.validation_fraction", self.validation_fraction, reason, fix)
