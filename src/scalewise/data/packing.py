"""Several texts in a row: which, and where each begins.

Shapes: N texts, B rows, S tokens of a row: its inputs and one label more.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scalewise.data.base import FIRST
from scalewise.data.datasets import PaddedDataset


def best_fit_pack(lengths_N: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Returns rows of texts, each at most ``capacity`` tokens: the longest texts are laid first.

    A text goes where it leaves the least room (best-fit decreasing, Ding et al. 2024, "Fewer
    Truncations Improve Language Modeling", section 3.1). Rows and what is in them keep the order
    of the texts.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # a bit for each room that some row has left
    for text in np.argsort(-lengths_N, kind="stable").tolist():
        length = int(lengths_N[text])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(text)
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return sorted(sorted(row) for row in rows)


class PackedTextDataset(PaddedDataset):
    """As many whole texts a row as fit; the first token of each is no label, and says so."""

    packing = True

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        texts: NDArray[np.int64],
        sequence: int,
        end_token: int,
    ) -> None:
        """``texts``: those that rows are made of."""
        super().__init__(ids_N, starts, texts, sequence, end_token)
        lengths = np.diff(starts)[texts].clip(max=self._width)
        self._rows = [texts[row] for row in best_fit_pack(lengths, self._width)]
        tokens = int(lengths.sum())
        one_each, now = (tokens / (count * self._width) for count in (len(texts), len(self)))
        self.fill_ratio = now
        self.packing_note = (
            f"packed into {len(self):,} rows, {now:.1%} full (one a row: {one_each:.1%})"
        )

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, the rows at ``indices``."""
        tokens_BS = np.full((len(indices), self._width), ~self._end_token, dtype=np.int64)
        for row_S, index in zip(tokens_BS, indices, strict=True):
            at = 0
            for text in self._rows[index]:
                found = self._text_ids(text)
                row_S[at : at + len(found)] = found
                row_S[at] = ~(max(row_S[at], ~row_S[at]) + FIRST)
                at += len(found)
        return tokens_BS
