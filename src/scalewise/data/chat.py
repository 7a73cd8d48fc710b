"""User-defined conversations; only answers are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.chat_formats import SUFFIXES, parse_conversation
from scalewise.data.chat_messages import RecordKeys
from scalewise.data.chat_templates import ConversationTemplate, TextSegment
from scalewise.data.file_patterns import match_paths, path_issues
from scalewise.data.tokenization import END_OF_TEXT, TokenizerSource
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option


@register_option("data", "chat")
@dataclass(frozen=True)
class ChatData(DataConfig):
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

    @property
    def required_vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer that is trained; None with a given one."""
        return self.vocabulary if self.tokenizer is None else None

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files, and values out of range."""
        yield from self.non_positive_issues("sequence")
        yield from self.tokenizer_source.validate()
        if not 0 <= self.validation_fraction < 1:
            reason = "must be at least 0 and below 1"
            fix = "set data.validation_fraction=0.05"
            yield ConfigIssue("data.validation_fraction", self.validation_fraction, reason, fix)
        if self.max_bad_rows < 0:
            fix = "set data.max_bad_rows=0"
            yield ConfigIssue("data.max_bad_rows", self.max_bad_rows, "is below zero", fix)
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.jsonl]'")
        yield from path_issues("data.paths", self.paths, SUFFIXES, "my/*.jsonl")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Render and tokenize the records into the cache, and return evenly spread splits."""
        from scalewise.data import chat_cache, content
        from scalewise.data.build_cache import build_cached

        if issues := list(self.validate()):
            raise DataError(issues)
        self.tokenizer_source.check_vocabulary(vocabulary)
        files = content.digests_by_content(match_paths(self.paths))
        folder = build_cached(
            self.kind,
            chat_cache.cache_identity(self, files),
            partial(chat_cache.write_records, self, list(files)),
        )
        return chat_cache.load_splits(folder, self)

    def render_record(
        self, record: dict[str, Any], template: ConversationTemplate
    ) -> tuple[list[TextSegment], ...]:
        """Return the rendered texts of a record; raises ``ValueError``."""
        return (template(parse_conversation(record, self.record_keys(template))),)

    def record_keys(self, template: ConversationTemplate) -> RecordKeys:
        """Return the keys to ignore, which are counted in the notes of the template."""
        return RecordKeys(self.ignore_keys, template.notes)

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Tokenizer of the conversations."""
        return TokenizerSource(self.vocabulary, self.tokenizer, self.end_of_text)
