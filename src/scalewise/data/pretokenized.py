"""Token ids in flat files, tokenized elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from scalewise.data.base import DataConfig, DataSplits
from scalewise.data.file_patterns import path_issues
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option

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
        """None: it is unknown before the shards are read."""
        return

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield absent or unknown files and a sequence length that is not positive."""
        yield from self.non_positive_issues("sequence")
        if not self.paths:
            yield ConfigIssue("data.paths", "[]", "is empty", "set 'data.paths=[my/*.bin]'")
        yield from path_issues("data.paths", self.paths, SUFFIXES, "my/*.bin")
        validation_paths = self.validation_paths
        yield from path_issues("data.validation_paths", validation_paths, SUFFIXES, "held/*.bin")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return packed sequences; the first call reads every id to find the largest."""
        if issues := list(self.validate()):
            raise DataError(issues)
        from scalewise.data.token_shards import TokenShards

        dtype, length, validation_paths = self.dtype.value, self.sequence, self.validation_paths
        train = TokenShards("data.paths", self.paths, dtype).load_packed(
            length, vocabulary, "train"
        )
        if not validation_paths:
            return DataSplits(train, None)
        shards = TokenShards("data.validation_paths", validation_paths, dtype)
        return DataSplits(train, shards.load_packed(length, vocabulary, "validation"))
