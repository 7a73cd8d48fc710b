"""User-defined records: conversations, preference pairs, questions, labeled texts and captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scalewise.data.base import TokenizedDataConfig
from scalewise.data.input_files import path_issues
from scalewise.data.record_files import CHAT_SUFFIXES
from scalewise.data.remote_files import is_remote
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import ConfigIssue
from scalewise.redaction import redact
from scalewise.registry import register_option


@register_option("data", "chat")
@dataclass(frozen=True)
class ChatData(TokenizedDataConfig):
    """Conversations, rendered by the tokenizer's chat template; only answers are labels."""

    sequence: int = 256
    """Sequence length, in tokens; longer conversations are truncated at the end."""
    paths: tuple[str, ...] = ()
    """Glob patterns of .jsonl, .json and .parquet files in Alpaca, ShareGPT or ``messages``
    format."""
    tokenizer: str | None = None
    """Path of a tokenizer.json with its chat template next to it; null: train a byte-level BPE on
    the text."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token that ends an answer without a template, and pads sequences."""
    validation_fraction: float = 0.05
    """Validation fraction of the conversations; 0: none."""
    packing: bool = False
    """Whether a sequence contains as many whole conversations as fit, with attention separated."""
    max_bad_rows: int = 0
    """Number of invalid records that are skipped; more are an error."""

    ignore_keys: tuple[str, ...] = ()
    """Keys of records and messages that are ignored; other unknown keys with content are errors."""

    kind: ClassVar[str] = "chat"
    record_description: ClassVar[str] = "conversation"
    record_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that decide how a record is read."""

    implementation = "scalewise.data.chat_cache"

    @property
    def is_continuous_text(self) -> bool:
        """False: labels, such as answers, are at the end of a sequence."""
        return False

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files, and values out of range."""
        yield from super().validate()
        if self.max_bad_rows < 0:
            fix = "set data.max_bad_rows=0"
            yield ConfigIssue("data.max_bad_rows", self.max_bad_rows, "is below zero", fix)
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.jsonl]'")
        yield from path_issues("data.paths", self.paths, CHAT_SUFFIXES, "my/*.jsonl")


@register_option("data", "preference")
@dataclass(frozen=True)
class PreferenceData(ChatData):
    """Pairs of answers to one question, chosen and rejected, rendered as in ``data=chat``."""

    kind: ClassVar[str] = "preference"
    record_description: ClassVar[str] = "pair of answers"
    pairs = True


@register_option("data", "seq2seq")
@dataclass(frozen=True)
class Seq2SeqData(ChatData):
    """Questions with answers for an encoder-decoder model, each truncated to its length.

    The question is the text before the last answer: one message as it is, several by the chat
    template.
    """

    sequence: int = 256
    """Length of a question with its answer, in tokens."""
    target_length: int = 64
    """Part of ``sequence`` that is for the answer, in tokens."""

    kind: ClassVar[str] = "seq2seq"
    record_description: ClassVar[str] = "question with an answer"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an invalid ``target_length``, and the issues of ``ChatData``."""
        yield from super().validate()
        if not 0 < self.target_length < self.sequence:
            yield self.target_length_issue()
        if self.packing:
            reason = "is not supported with separate encoder and decoder texts"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")


@register_option("data", "labelled")
@dataclass(frozen=True)
class LabeledText(ChatData):
    """Texts with a class label; longer texts are truncated at the end."""

    classes: tuple[str, ...] = ()
    """Class names as records spell them; a record may have the class index from 0 instead."""
    text: str = "text"
    """Key of the text in a record."""
    label: str = "label"
    """Key of the class in a record."""

    kind: ClassVar[str] = "labelled"
    record_description: ClassVar[str] = "text of a known class"
    record_fields: ClassVar[tuple[str, ...]] = ("classes", "text", "label")

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield invalid class names, and the issues of ``ChatData``."""
        yield from super().validate()
        if len({*self.classes}) < max(2, len(self.classes)):
            reason, fix = "must be at least two different names", "set 'data.classes=[no,yes]'"
            yield ConfigIssue("data.classes", list(self.classes), reason, fix)
        if self.packing:
            reason = "is not supported with classes: a sequence has one class"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")


@register_option("data", "captions")
@dataclass(frozen=True)
class CaptionData(ChatData):
    """Images with captions; a record names an image file next to it (.png, .jpg or .npy)."""

    sequence: int = 32
    """Caption length with its end token, in tokens; longer captions are truncated."""
    image_size: int = 224
    """Image side after resizing, in pixels; must be the model's."""
    picture: str = "image"
    """Key of the image file name in a record."""
    caption: str = "caption"
    """Key of the caption in a record."""

    kind: ClassVar[str] = "captions"
    record_description: ClassVar[str] = "image with a caption"
    record_fields: ClassVar[tuple[str, ...]] = ("image_size", "picture", "caption")

    implementation = "scalewise.data.caption_cache"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an invalid image size, and the issues of ``ChatData``."""
        yield from super().validate()
        for path in filter(is_remote, self.paths):
            reason = "is remote, and images are files next to the file with their captions"
            yield ConfigIssue("data.paths", redact(path), reason, "copy the folder to a local path")
        yield from self.non_positive_issues("image_size")
        if self.packing:
            reason = "is not supported with images: each caption has its own image"
            yield ConfigIssue("data.packing", True, reason, "set data.packing=false")
