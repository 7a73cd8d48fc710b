"""User-defined text: files, Hugging Face datasets, and token ids that are tokenized elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scalewise.data.base import DataConfig, TokenizedDataConfig
from scalewise.data.input_files import file_suffix, match_names, path_issues
from scalewise.data.record_files import RECORD_SUFFIXES
from scalewise.data.text_files import PLAIN_SUFFIXES
from scalewise.data.tokenizer import END_OF_TEXT
from scalewise.errors import ConfigIssue
from scalewise.registry import register_option
from scalewise.regular_files import expand_home

SHARD_SUFFIXES = frozenset({".bin", ".npy"})
"""Suffixes of files of token ids."""


class TokenDtype(Enum):
    """Integer type of a .bin file."""

    uint16 = "uint16"
    """2 bytes per token."""
    uint32 = "uint32"
    """4 bytes per token."""


@register_option("data", "text")
@dataclass(frozen=True)
class TextData(TokenizedDataConfig):
    """Text files, tokenized once into a cache, and again when a file changes."""

    sequence: int = 256
    """Sequence length, in tokens."""
    paths: tuple[str, ...] = ()
    """Glob patterns of plain text, .jsonl and .parquet files, relative to the working directory, or
    URLs; text and .jsonl may be compressed."""
    field: str | None = None
    """Field of .jsonl and .parquet files with the text."""
    tokenizer: str | None = None
    """Path of a tokenizer.json or of a tokenizer's folder; null: train a byte-level BPE on the
    text."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""
    special_tokens: bool = True
    """Whether documents get the special tokens that the tokenizer adds, such as a leading <bos>."""
    validation_fraction: float = 0.05
    """Validation fraction, by file, or within the file if there is one; 0: none."""

    implementation = "scalewise.data.tokenized_cache"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files, a missing field, and values out of range."""
        yield from super().validate()
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.txt]'")
        yield from path_issues(
            "data.paths", self.paths, PLAIN_SUFFIXES | RECORD_SUFFIXES, "my/*.txt"
        )
        records = [path for path in match_names(self.paths) if file_suffix(path) in RECORD_SUFFIXES]
        if records and not self.field:
            reason = f"{records[0]} contains records, whose text field is not set"
            yield ConfigIssue("data.field", "null", reason, "set data.field=text")


@register_option("data", "hf")
@dataclass(frozen=True)
class HFDatasetData(TokenizedDataConfig):
    """A dataset of the ``datasets`` library, tokenized once or while streaming.

    A Hub dataset is tokenized again only when one of these options changes; set ``revision`` to pin
    its version. Dataset scripts are never executed.
    """

    sequence: int = 256
    """Sequence length, in tokens."""
    path: str = ""
    """Name on the Hub, folder of .jsonl or .parquet files, or ``save_to_disk`` folder."""
    configuration: str | None = None
    """Configuration (subset) of the dataset, if it has several."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; null: the newest."""
    split: str = "train"
    """Training split; slices such as train[:95%] only without streaming."""
    validation_split: str | None = None
    """Validation split, always tokenized into the cache; null: no validation."""
    field: str = "text"
    """Column with the text."""
    streaming: bool = False
    """Whether text is tokenized while training, in stored order; every rank reads the whole
    stream."""
    tokenizer: str | None = None
    """Path of a tokenizer.json or of a tokenizer's folder; null: train a byte-level BPE on the
    text."""
    vocabulary: int = 4096
    """Vocabulary size of the trained BPE, in tokens; at least 257. Ignored with a
    given tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token between documents, by its name in the given tokenizer."""
    special_tokens: bool = True
    """Whether documents get the special tokens that the tokenizer adds, such as a leading <bos>."""

    implementation = "scalewise.data.hf_datasets"

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an empty path, an absent local folder, and values out of range."""
        yield from super().validate()
        if not self.path:
            fix = "set data.path=roneneldan/TinyStories, or a folder"
            yield ConfigIssue("data.path", "''", "is empty", fix)
        elif self.path.startswith((".", "/", "~")) and not self.dataset_folder.is_dir():
            yield ConfigIssue(
                "data.path", self.path, "no such folder", "set data.path to a folder or a Hub name"
            )
        for field in ("split", "field"):
            if not getattr(self, field):
                yield ConfigIssue(f"data.{field}", "''", "is empty", f"set data.{field}=NAME")

    @property
    def dataset_folder(self) -> Path:
        """Path of a local dataset; no folder if the dataset is on the Hub."""
        return expand_home(self.path)


@register_option("data", "tokens")
@dataclass(frozen=True)
class PretokenizedData(DataConfig):
    """Shards of token ids, memory-mapped; a sequence never spans two shards."""

    sequence: int = 256
    """Sequence length, in tokens."""
    paths: tuple[str, ...] = ()
    """Glob patterns or URLs of training shards: .bin (flat, little-endian, no header) and 1-D
    .npy."""
    validation_paths: tuple[str, ...] = ()
    """Glob patterns of validation shards; empty: no validation."""
    dtype: TokenDtype = TokenDtype.uint16
    """Integer type of .bin files; .npy files have their own."""

    implementation = "scalewise.data.token_shards"

    @property
    def required_vocabulary(self) -> None:
        """None: it is unknown before the shards are read."""
        return

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files and a sequence length that is not positive."""
        yield from self.non_positive_issues("sequence")
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.bin]'")
        yield from path_issues("data.paths", self.paths, SHARD_SUFFIXES, "my/*.bin")
        validation_paths = self.validation_paths
        yield from path_issues(
            "data.validation_paths", validation_paths, SHARD_SUFFIXES, "held/*.bin"
        )
