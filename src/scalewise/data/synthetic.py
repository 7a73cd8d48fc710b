"""Random token ids, for studies of time and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalewise.config.registry import option
from scalewise.data.base import Data, Splits
from scalewise.errors import Complaint, DataError


@option("data", "synthetic")
@dataclass(frozen=True)
class Synthetic(Data):
    """Ids drawn evenly from a vocabulary: no file is read, and nothing can be learned."""

    sequence: int = 256
    """Tokens of a row."""
    vocabulary: int | None = None
    """Distinct token ids; null takes the model's vocabulary."""
    rows: int = 100_000
    """Rows of an epoch; a twentieth as many more are held out."""

    @property
    def vocabulary_needed(self) -> int | None:
        """Returns ``vocabulary``."""
        return self.vocabulary

    def complaints(self) -> Iterator[Complaint]:
        """Yields numbers that are not positive."""
        yield from self.not_positive("sequence", "rows")
        if self.vocabulary is not None:
            yield from self.not_positive("vocabulary")

    def prepare(self, vocabulary: int, seed: int) -> Splits:
        """Returns rows that are a function of ``seed`` and their index."""
        ids = self.vocabulary or vocabulary
        if ids > vocabulary:
            reason = f"makes ids up to {ids - 1}, but the model's vocabulary is {vocabulary}"
            raise DataError.one("data.vocabulary", ids, reason, "give data.vocabulary=null")
        held = max(1, self.rows // 20)
        return Splits(
            RandomRows(seed, ids, 0, self.rows, self.sequence),
            RandomRows(seed, ids, self.rows, held, self.sequence),
        )


@dataclass(frozen=True)
class RandomRows:
    """``rows`` rows of ids, the rows from ``first`` of an endless table keyed by ``seed``."""

    seed: int
    vocabulary: int
    first: int
    rows: int
    sequence: int
    streamed: bool = False

    def __len__(self) -> int:
        return self.rows

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``: a hash of (seed, row, place), modulo the vocabulary."""
        width = self.sequence + 1
        index_B = np.asarray(indices, dtype=np.int64) + self.first
        place_BS = (index_B[:, None] * width + np.arange(width)).astype(np.uint64)
        key = _mix(np.array([self.seed], dtype=np.uint64))
        return (_mix(place_BS + key) % np.uint64(self.vocabulary)).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the SplitMix64 hash of each element (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
