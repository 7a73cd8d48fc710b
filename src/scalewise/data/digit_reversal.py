"""Digit reversal: a synthetic task with verifiable answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.data.base import DataConfig, DataSplits
from scalewise.errors import ConfigIssue, DataError
from scalewise.registry import register_option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEPARATOR, VOCABULARY = 10, 11
"""Id that ends a prompt, after those of the ten digits, and the vocabulary size."""
HELD_OUT_INTERVAL = 10
"""Number of distinct prompts per held-out prompt."""


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

    @property
    def answer_length(self) -> int:
        """Number of digits of an answer, equal to that of a prompt."""
        return self.sequence // 2

    @property
    def required_vocabulary(self) -> int:
        """Digits and the separator."""
        return VOCABULARY

    def validate(self) -> Iterator[ConfigIssue]:
        """Yield an invalid number of rows or sequence length."""
        yield from self.non_positive_issues("rows")
        if self.sequence < 2 or self.sequence % 2:
            reason = "must be twice the number of digits of a prompt"
            fix = f"set data.sequence={max(2, self.sequence + 1)}"
            yield ConfigIssue("data.sequence", self.sequence, reason, fix)

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Return distinct random prompts."""
        import numpy as np

        from scalewise.data.datasets import RandomDataset

        if vocabulary < VOCABULARY:
            reason, fix = (
                f"is below the {VOCABULARY} token ids of the data",
                f"set model.vocabulary={VOCABULARY}",
            )
            raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
        digits_ND = RandomDataset(seed, 10, 0, self.rows, self.answer_length - 1).gather(
            range(self.rows)
        )
        _, first_indices = np.unique(digits_ND, axis=0, return_index=True)
        distinct_ND = digits_ND[np.sort(first_indices)]
        held_out = max(1, len(distinct_ND) // HELD_OUT_INTERVAL)
        if held_out == len(distinct_ND):
            reason = "leaves no training data next to the held-out prompts"
            raise DataError.for_key("data.rows", self.rows, reason, "increase data.rows")
        return DataSplits(
            DigitReversalDataset(distinct_ND[held_out:]),
            DigitReversalDataset(distinct_ND[:held_out]),
        )


@dataclass(frozen=True, eq=False)
class DigitReversalDataset:
    """Sequences of ``digits_ND``, a separator, and the reversed digits."""

    digits: NDArray[np.int64]

    streamed = False
    masked = True
    packing = False
    target_length = 0

    def __len__(self) -> int:
        return len(self.digits)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``; prompts have no labels."""
        import numpy as np

        digits_BD = self.digits[np.asarray(indices, dtype=np.int64)]
        separator_B1 = np.full((len(digits_BD), 1), ~SEPARATOR)
        return np.concatenate([~digits_BD, separator_B1, digits_BD[:, ::-1]], axis=1)
