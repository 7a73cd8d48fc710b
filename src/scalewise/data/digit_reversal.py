"""Digits to be written backwards: nothing is read, and every answer can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import register_option
from scalewise.data.base import DataConfig, DataSplits
from scalewise.errors import ConfigIssue, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIGN, VOCABULARY = 10, 11
"""The id that ends a prompt, behind those of the ten digits, and how many there are."""
HELD_OUT = 10
"""One row of so many is held out."""


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
        """Returns the digits of an answer, as many as of a prompt."""
        return self.sequence // 2

    @property
    def required_vocabulary(self) -> int:
        """Returns the digits and the sign."""
        return VOCABULARY

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields lengths that no row has."""
        yield from self.non_positive_issues("rows")
        if self.sequence < 2 or self.sequence % 2:
            reason = "is not twice the digits of a prompt"
            fix = f"set data.sequence={max(2, self.sequence + 1)}"
            yield ConfigIssue("data.sequence", self.sequence, reason, fix)

    def prepare(self, vocabulary: int, seed: int) -> DataSplits:
        """Returns distinct prompts, drawn by ``seed``."""
        import numpy as np

        from scalewise.data.datasets import RandomDataset

        if vocabulary < VOCABULARY:
            reason, fix = f"needs {VOCABULARY} token ids", f"give model.vocabulary={VOCABULARY}"
            raise DataError.for_key("model.vocabulary", vocabulary, reason, fix)
        drawn_ND = RandomDataset(seed, 10, 0, self.rows, self.answer_length - 1).gather(
            range(self.rows)
        )
        _, first = np.unique(drawn_ND, axis=0, return_index=True)
        distinct_ND = drawn_ND[np.sort(first)]
        held = max(1, len(distinct_ND) // HELD_OUT)
        if held == len(distinct_ND):
            reason = "leaves nothing to train on beside what is held out"
            raise DataError.for_key("data.rows", self.rows, reason, "give more data.rows")
        return DataSplits(
            DigitReversalDataset(distinct_ND[held:]), DigitReversalDataset(distinct_ND[:held])
        )


@dataclass(frozen=True, eq=False)
class DigitReversalDataset:
    """Rows of ``digits_ND`` and, behind a sign, the same backwards."""

    digits: NDArray[np.int64]

    streamed = False
    masked = True
    packing = False
    target_length = 0

    def __len__(self) -> int:
        return len(self.digits)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``; prompts are no labels."""
        import numpy as np

        digits_BD = self.digits[np.asarray(indices, dtype=np.int64)]
        sign_B1 = np.full((len(digits_BD), 1), ~SIGN)
        return np.concatenate([~digits_BD, sign_B1, digits_BD[:, ::-1]], axis=1)
