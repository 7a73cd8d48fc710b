"""Token ids that were made elsewhere, in flat files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from scalewise.config.registry import register_option
from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.file_patterns import path_issues
from scalewise.errors import ConfigIssue, DataError

SUFFIXES = frozenset({".bin", ".npy"})


class TokenDtype(Enum):
    """Integer type of a .bin file."""

    uint16 = "uint16"
    """2 bytes per token."""
    uint32 = "uint32"
    """4 bytes per token."""


@register_option("data", "tokens")
@dataclass(frozen=True)
class PretokenizedData(DataConfig):
    """Shards of token ids, memory-mapped; a sequence never spans two shards."""

    sequence: int = 256
    """Sequence length, in tokens."""
    paths: tuple[str, ...] = ()
    """Glob patterns of training shards: .bin (flat, little-endian, no header) and 1-D .npy."""
    validation_paths: tuple[str, ...] = ()
    """Glob patterns of validation shards; empty: no validation."""
    dtype: TokenDtype = TokenDtype.uint16
    """Integer type of .bin files; .npy files have their own."""

    @property
    def required_vocabulary(self) -> None:
        """Returns None: the shards must be read to know."""
        return

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields absent or unknown files and a sequence that is not positive."""
        yield from self.non_positive_issues("sequence")
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "give 'data.paths=[my/*.bin]'")
        yield from path_issues("data.paths", self.paths, SUFFIXES, "my/*.bin")
        held = self.validation_paths
        yield from path_issues("data.validation_paths", held, SUFFIXES, "held/*.bin")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns the packed rows; the first time every id is read to find the largest."""
        if issues := list(self.validate()):
            raise DataError(issues)
        from scalewise.data.token_shards import TokenShards

        kind, length, held = self.dtype.value, self.sequence, self.validation_paths
        train = TokenShards("data.paths", self.paths, kind).load_packed(length, vocabulary, "train")
        if not held:
            return DataSplits(train, None)
        shards = TokenShards("data.validation_paths", held, kind)
        return DataSplits(train, shards.load_packed(length, vocabulary, "validation"))
