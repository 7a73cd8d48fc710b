"""Random token ids, for studies of time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.config.registry import register_option
from scalewise.data.base import DataConfig, DataSplits
from scalewise.errors import ConfigIssue, DataError


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

    @property
    def required_vocabulary(self) -> int | None:
        """Returns ``vocabulary``."""
        return self.vocabulary

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields numbers that are not positive."""
        yield from self.non_positive_issues("sequence", "rows")
        if self.vocabulary is not None:
            yield from self.non_positive_issues("vocabulary")
        if not 0 <= self.masked < 1:
            yield ConfigIssue("data.masked", self.masked, "is a share, in [0, 1)")
        if not 0 <= self.target_length < max(1, self.sequence):
            yield self.target_length_issue()
        for key in ("pairs", "packing"):
            if self.target_length and getattr(self, key):
                reason = "is for rows that one model reads, and data.target_length is another's"
                yield ConfigIssue(f"data.{key}", True, reason, f"set data.{key}=false")

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns rows that are a function of ``seed`` and their index."""
        from scalewise.data.datasets import RandomDataset

        ids = self.vocabulary or vocabulary
        if ids > vocabulary:
            reason = f"makes ids up to {ids - 1}, but the model's vocabulary is {vocabulary}"
            raise DataError.for_key("data.vocabulary", ids, reason, "give data.vocabulary=null")
        held = max(1, self.rows // 20)
        kind = (self.sequence, self.masked, self.pairs, self.packing, self.target_length)
        return DataSplits(
            RandomDataset(seed, ids, 0, self.rows, *kind),
            RandomDataset(seed, ids, self.rows, held, *kind),
        )
