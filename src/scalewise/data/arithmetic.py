"""Additions to be answered digit by digit: nothing is read, and every answer can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalewise.config.registry import option
from scalewise.data.base import Data, Splits
from scalewise.errors import Complaint, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PLUS, EQUALS, VOCABULARY = 10, 11, 12
"""Ids behind those of the ten digits, and how many there are."""
HELD_OUT = 20
"""One row of so many is held out."""


@option("data", "arithmetic")
@dataclass(frozen=True)
class Arithmetic(Data):
    """Rows ``23+45=068``: two numbers of equal length, and the sum that answers them."""

    sequence: int = 8
    """Tokens of a row: two more than three times the digits of a number."""
    rows: int = 10_000
    """Additions that are drawn; a twentieth of the distinct ones is held out."""

    @property
    def answer(self) -> int:
        """Returns the digits of a sum, one more than of a number."""
        return (self.sequence + 1) // 3

    @property
    def vocabulary_needed(self) -> int:
        """Returns the digits and the two signs."""
        return VOCABULARY

    def complaints(self) -> Iterator[Complaint]:
        """Yields lengths that no addition has."""
        yield from self.not_positive("rows")
        if self.sequence < 5 or self.sequence % 3 != 2:
            near = max(5, self.sequence // 3 * 3 + 2)
            reason = "is not two more than three times the digits of a number"
            yield Complaint("data.sequence", self.sequence, reason, f"set data.sequence={near}")

    def prepare(self, vocabulary: int, seed: int) -> Splits:
        """Returns distinct additions, drawn by ``seed``."""
        import numpy as np

        from scalewise.data.rows import RandomRows

        if vocabulary < VOCABULARY:
            reason, cure = f"needs {VOCABULARY} token ids", f"give model.vocabulary={VOCABULARY}"
            raise DataError.one("model.vocabulary", vocabulary, reason, cure)
        digits = self.answer - 1
        drawn = RandomRows(seed, 10, 0, self.rows, 2 * digits - 1).gather(range(self.rows))
        _, first = np.unique(drawn, axis=0, return_index=True)
        distinct_N2D = drawn[np.sort(first)].reshape(-1, 2, digits)
        held = max(1, len(distinct_N2D) // HELD_OUT)
        if held == len(distinct_N2D):
            reason = "leaves nothing to train on beside what is held out"
            raise DataError.one("data.rows", self.rows, reason, "give more data.rows")
        return Splits(Additions(distinct_N2D[held:]), Additions(distinct_N2D[:held]))


@dataclass(frozen=True, eq=False)
class Additions:
    """Rows of the additions of ``numbers``, ``digits_N2D`` with the highest first."""

    numbers: NDArray[np.int64]

    streamed = False
    masked = True

    def __len__(self) -> int:
        return len(self.numbers)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``; prompts are no labels."""
        import numpy as np

        one_BD, other_BD = self.numbers[np.asarray(indices, dtype=np.int64)].swapaxes(0, 1)
        sum_BA = np.pad(one_BD + other_BD, ((0, 0), (1, 0)))
        for place in range(sum_BA.shape[1] - 1, 0, -1):
            sum_BA[:, place - 1] += sum_BA[:, place] // 10
            sum_BA[:, place] %= 10
        signs_2B1 = np.full((2, len(sum_BA), 1), [[[PLUS]], [[EQUALS]]])
        prompt_BP = np.concatenate([one_BD, signs_2B1[0], other_BD, signs_2B1[1]], axis=1)
        return np.concatenate([~prompt_BP, sum_BA], axis=1)
