"""Random token ids for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalewise.data.base import DataConfig, DataSplits
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option


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

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return samples that are a function of ``seed`` and their index."""
        from scalewise.data.datasets import RandomDataset

        vocabulary_size = self.vocabulary or vocabulary
        if vocabulary_size > vocabulary:
            reason = (
                f"has ids up to {vocabulary_size - 1}, but the model's vocabulary is {vocabulary}"
            )
            raise DataError.for_key(
                "data.vocabulary", vocabulary_size, reason, "set data.vocabulary=null"
            )
        held_out = max(1, self.rows // 20)
        options = (self.sequence, self.masked, self.pairs, self.packing, self.target_length)
        return DataSplits(
            RandomDataset(seed, vocabulary_size, 0, self.rows, *options),
            RandomDataset(seed, vocabulary_size, self.rows, held_out, *options),
        )
