"""Token ids that were made elsewhere, in flat files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from scalewise.config.registry import option
from scalewise.data.base import Data, Splits
from scalewise.data.file_patterns import path_complaints
from scalewise.errors import Complaint, DataError

SUFFIXES = frozenset({".bin", ".npy"})


class TokenType(Enum):
    """The integers of a .bin file."""

    uint16 = "uint16"
    uint32 = "uint32"


@option("data", "tokens")
@dataclass(frozen=True)
class Tokens(Data):
    """Shards of token ids, memory-mapped where they lie; a row never spans two shards."""

    sequence: int = 256
    """Tokens of a row."""
    paths: tuple[str, ...] = ()
    """Globs of .bin (flat, little-endian, no header) and 1-D .npy shards to train on."""
    validation_paths: tuple[str, ...] = ()
    """Globs of the held-out shards; empty validates on nothing."""
    dtype: TokenType = TokenType.uint16
    """Type of the ids in .bin files; a .npy says its own."""

    @property
    def vocabulary_needed(self) -> None:
        """Returns None: the shards must be read to know."""
        return

    def complaints(self) -> Iterator[Complaint]:
        """Yields absent or unknown files and a sequence that is not positive."""
        yield from self.not_positive("sequence")
        if not self.paths:
            yield Complaint("data.paths", "[]", "is empty", "give 'data.paths=[my/*.bin]'")
        yield from path_complaints("data.paths", self.paths, SUFFIXES, "my/*.bin")
        held = self.validation_paths
        yield from path_complaints("data.validation_paths", held, SUFFIXES, "held/*.bin")

    def prepare(self, vocabulary: int, seed: int) -> Splits:
        """Returns the packed rows; the first time every id is read to find the largest."""
        if complaints := list(self.complaints()):
            raise DataError(complaints)
        from scalewise.data.shards import Shards

        kind, length, held = self.dtype.value, self.sequence, self.validation_paths
        train = Shards("data.paths", self.paths, kind).rows(length, vocabulary, "train")
        if not held:
            return Splits(train, None)
        shards = Shards("data.validation_paths", held, kind)
        return Splits(train, shards.rows(length, vocabulary, "validation"))
