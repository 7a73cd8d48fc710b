"""Data without a source: random token ids, digit reversal, and drawn shapes with captions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

from scalewise.data.base import DataConfig
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option

SEPARATOR, DIGIT_VOCABULARY = 10, 11
"""Id that ends a prompt, after those of the ten digits, and the vocabulary size."""

SIZES = ("small", "large")
COLORS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "pink": (1, 0, 1),
    "white": (1, 1, 1),
}
"""Colors of a shape, with the RGB channels in which it is bright."""
SHAPES = ("square", "cross", "ring")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
CAPTION_PARTS: tuple[Collection[str], ...] = (SIZES, COLORS, SHAPES, ROWS, COLUMNS)
CAPTIONS = tuple(product(*(range(len(part)) for part in CAPTION_PARTS)))
"""All captions, as the indices of their words in each part."""
WORDS = (END_OF_TEXT, "a", *(word for part in CAPTION_PARTS for word in part))
CAPTION_TOKENS = len(CAPTION_PARTS) + 2
"""Number of tokens of a caption, with the leading ``a`` and the end token."""
MIN_IMAGE_SIZE = 24
"""Smallest image side at which all shapes can be distinguished, in pixels."""


@register_option("data", "synthetic")
@dataclass(frozen=True)
class RandomTokens(DataConfig):
    """Uniformly random token ids, for benchmarks: no file is read and nothing can be learned."""

    sequence: int = 256
    """Sequence length, in tokens."""
    vocabulary: int | None = None
    """Number of distinct ids, in tokens; null: the model's vocabulary."""
    rows: int = 100_000
    """Number of sequences per epoch, in samples; 5 % more are held out."""
    masked: float = 0.0
    """Fraction of the tokens without a label, as for padding and prompts."""
    pairs: bool = False
    """Whether a sample is a pair of sequences, as objective=dpo compares them."""
    packing: bool = False
    """Whether a sequence contains several documents with separated attention."""
    target_length: int = 0
    """Length of the decoder's part of a sequence for objective=seq2seq, in tokens; the encoder
    reads the rest."""

    implementation = "scalewise.data.synthetic_datasets"

    @property
    def required_vocabulary(self) -> int | None:
        """``vocabulary``."""
        return self.vocabulary

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield values out of range."""
        yield from self.non_positive_issues("sequence", "rows")
        if self.vocabulary is not None:
            yield from self.non_positive_issues("vocabulary")
        if not 0 <= self.masked < 1:
            yield ConfigIssue("data.masked", self.masked, "must be at least 0 and below 1")
        if not 0 <= self.target_length < max(1, self.sequence):
            yield self.target_length_issue()
        for key in ("pairs", "packing"):
            if self.target_length and getattr(self, key):
                reason = "is not supported with data.target_length"
                yield ConfigIssue(f"data.{key}", True, reason, f"set data.{key}=false")


@register_option("data", "reversal")
@dataclass(frozen=True)
class DigitReversal(DataConfig):
    """Sequences such as ``427=724``, whose answers can be checked.

    A constant guess is right for a tenth of the digits.
    """

    sequence: int = 6
    """Sequence length, in tokens: twice the digits of a prompt."""
    rows: int = 10_000
    """Number of prompts per epoch, in samples; a tenth of the distinct prompts is held out."""

    implementation = "scalewise.data.synthetic_datasets"

    @property
    def is_continuous_text(self) -> bool:
        """False: the answer is at the end of a sequence."""
        return False

    @property
    def answer_length(self) -> int:
        """Number of digits of an answer, equal to that of a prompt."""
        return self.sequence // 2

    @property
    def required_vocabulary(self) -> int:
        """Digits and the separator."""
        return DIGIT_VOCABULARY

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an invalid number of rows or sequence length."""
        yield from self.non_positive_issues("rows")
        if self.sequence < 2 or self.sequence % 2:
            reason = "must be twice the number of digits of a prompt"
            fix = f"set data.sequence={max(2, self.sequence + 1)}"
            yield ConfigIssue("data.sequence", self.sequence, reason, fix)


@register_option("data", "shapes")
@dataclass(frozen=True)
class SyntheticShapes(DataConfig):
    """Drawn images with captions such as ``a small red square top left``.

    Held-out captions are never trained on.
    """

    sequence: int = CAPTION_TOKENS
    """Caption length with its end token, in tokens."""
    image_size: int = 32
    """Image side, in pixels."""
    rows: int = 10_000
    """Number of images per epoch, in samples; 10 % more are held out."""

    implementation = "scalewise.data.synthetic_datasets"

    @property
    def is_continuous_text(self) -> bool:
        """False: a caption describes its image as a whole."""
        return False

    @property
    def required_vocabulary(self) -> int:
        """Number of words and the end token."""
        return len(WORDS)

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield too small captions or images."""
        yield from self.non_positive_issues("rows")
        for key, minimum in (("sequence", CAPTION_TOKENS), ("image_size", MIN_IMAGE_SIZE)):
            if (value := getattr(self, key)) < minimum:
                reason = f"is below {minimum}, the minimum for a caption or an image"
                yield ConfigIssue(f"data.{key}", value, reason, f"set data.{key}={minimum}")
