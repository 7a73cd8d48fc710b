"""Packing of several texts into one sequence.

Shapes: N texts, B sequences, S tokens of a sequence: its inputs and one more label.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scalewise.data.base import FIRST_TOKEN_OFFSET
from scalewise.data.datasets import PaddedDataset


def best_fit_pack(lengths_N: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return sequences of text indices, each of at most ``capacity`` tokens.

    The longest texts are placed first. A text goes where it leaves the least free space (best-fit
    decreasing, Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3.1).
    Sequences, and the texts in them, keep the order of the texts.
    """
    sequences: list[list[int]] = []
    by_free_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    free_mask = 0  # bit n is set if some sequence has n free tokens
    for text in np.argsort(-lengths_N, kind="stable").tolist():
        length = int(lengths_N[text])
        fitting = free_mask >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            sequence = by_free_space[free].pop()
            free_mask ^= 0 if by_free_space[free] else 1 << free
        else:
            free, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(text)
        by_free_space[free - length].append(sequence)
        free_mask |= 1 << (free - length)
    return sorted(sorted(sequence) for sequence in sequences)


class PackedTextDataset(PaddedDataset):
    """As many whole texts per sequence as fit; the first token of each text has no label."""

    packing = True

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        texts: NDArray[np.int64],
        sequence: int,
        end_token: int,
    ) -> None:
        """``texts``: indices of the texts to pack."""
        super().__init__(ids_N, starts, texts, sequence, end_token)
        lengths = np.diff(starts)[texts].clip(max=self._width)
        self._sequences = [
            texts[sequence_texts] for sequence_texts in best_fit_pack(lengths, self._width)
        ]
        tokens = int(lengths.sum())
        unpacked_ratio, packed_ratio = (
            tokens / (count * self._width) for count in (len(texts), len(self))
        )
        self.fill_ratio = packed_ratio
        self.packing_note = (
            f"packed into {len(self):,} sequences, {packed_ratio:.1%} full "
            f"(one text each: {unpacked_ratio:.1%})"
        )

    def __len__(self) -> int:
        return len(self._sequences)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``, the sequences at ``indices``."""
        tokens_BS = np.full((len(indices), self._width), ~self._end_token, dtype=np.int64)
        for tokens_S, index in zip(tokens_BS, indices, strict=True):
            start = 0
            for text in self._sequences[index]:
                ids = self._text_ids(text)
                tokens_S[start : start + len(ids)] = ids
                tokens_S[start] = ~(max(tokens_S[start], ~tokens_S[start]) + FIRST_TOKEN_OFFSET)
                start += len(ids)
        return tokens_BS
