"""Rows of token ids: packed end to end in memory-mapped shards, or cut from a stream.

Shapes: B rows, S = sequence + 1 tokens of a row (T inputs and one more label).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from scalewise.data.base import FIRST, NOTHING

TEXT = 32
"""Tokens of a random text on average."""


class PackedDataset:
    """Rows cut end to end from 1-D shards of token ids; a row never spans two shards.

    Row i of a shard is its tokens ``i * sequence`` to ``(i + 1) * sequence`` inclusive: the last
    label of a row is the first input of the next, so every token but a shard's first is a label.
    """

    streamed = False
    masked = False
    packing = False
    target_length = 0

    def __init__(self, shards: Sequence[NDArray[np.integer]], sequence: int) -> None:
        long_enough = [np.asarray(shard) for shard in shards if len(shard) > sequence]
        self._width = sequence + 1
        self._windows = [sliding_window_view(s, self._width)[::sequence] for s in long_enough]
        self._ends = np.cumsum([len(windows) for windows in self._windows], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, the rows at ``indices``."""
        index_B = np.asarray(indices, dtype=np.int64)
        if len(self._windows) == 1:
            return self._windows[0][index_B].astype(np.int64)
        tokens_BS = np.empty((len(index_B), self._width), dtype=np.int64)
        shard_B = np.searchsorted(self._ends, index_B, side="right")
        for shard in np.unique(shard_B):
            windows, mine_B = self._windows[shard], shard_B == shard
            tokens_BS[mine_B] = windows[index_B[mine_B] - self._ends[shard] + len(windows)]
        return tokens_BS


class PaddedDataset:
    """One text a row, of ids of which those below zero are no labels; cut, or filled with
    ``~end_token``.

    Text i is ``ids_N[starts[i] : starts[i + 1]]``. A row of a pair has two of them. ``fill_ratio``
    is the share of the rows' places that no padding takes.
    """

    streamed = False
    masked = True
    packing = False
    target_length = 0

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        texts: NDArray[np.int64],
        sequence: int,
        end_token: int,
    ) -> None:
        """``texts``: those that are rows, in their order; pairs as ``texts_N2``."""
        self._ids, self._starts, self._texts = ids_N, starts, texts
        self._width, self._end_token = sequence + 1, end_token
        self.total_texts = len(starts) - 1
        self.dropped_texts = self.total_texts - texts.size
        lengths = np.diff(starts)[texts]
        self.truncated_texts = int((lengths > self._width).sum())
        places = lengths.size * self._width
        self.fill_ratio = float(lengths.clip(max=self._width).sum() / places) if places else 1.0

    def __len__(self) -> int:
        return len(self._texts)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, or ``tokens_B2S``, the rows at ``indices``."""
        texts = self._texts[np.asarray(indices)]
        tokens_BS = np.full((texts.size, self._width), ~self._end_token, dtype=np.int64)
        for row_S, text in zip(tokens_BS, texts.flat, strict=True):
            found = self._text_ids(text)
            row_S[: len(found)] = found
        return tokens_BS.reshape(*texts.shape, self._width)

    def _text_ids(self, text: int) -> NDArray[np.int32]:
        return self._ids[self._starts[text] : self._starts[text + 1]][: self._width]


class ClassificationDataset(PaddedDataset):
    """One text a row and, behind what the row has room for, the number of its class."""

    def _text_ids(self, text: int) -> NDArray[np.int32]:
        found = self._ids[self._starts[text] : self._starts[text + 1]]
        return np.concatenate([found[:-1][: self._width - 1], found[-1:]])


class AnswerDataset(PaddedDataset):
    """A question a row, cut or filled up, and its answer in the last ``target_length`` places, as
    well."""

    def __init__(
        self,
        ids_N: NDArray[np.int32],
        starts: NDArray[np.int64],
        texts: NDArray[np.int64],
        sequence: int,
        end_token: int,
        *,
        target_length: int,
    ) -> None:
        """``texts``: those that are rows, in each of which an answer follows a question."""
        super().__init__(ids_N, starts, texts, sequence, end_token)
        self.target_length, self._source_length = target_length, sequence - target_length
        lengths = [[*map(len, self._split_answer(text))] for text in texts]
        self.truncated_texts = int(
            (np.array(lengths) > [self._source_length, target_length]).any(1).sum()
        )
        if lengths:
            read = np.minimum(lengths, [self._source_length, target_length])
            self.fill_ratio = float(read.sum() / (len(lengths) * sequence))

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, the rows at ``indices``, S = sequence."""
        texts = self._texts[np.asarray(indices)]
        question_BS = np.full((len(texts), self._source_length), NOTHING, dtype=np.int64)
        answer_BT = np.full((len(texts), self.target_length), ~self._end_token, dtype=np.int64)
        for question_S, answer_T, text in zip(question_BS, answer_BT, texts, strict=True):
            asked, told = self._split_answer(text)
            question_S[: len(asked)] = asked[: self._source_length]
            answer_T[: len(told)] = told[: self.target_length]
        return np.concatenate([question_BS, answer_BT], axis=1)

    def _split_answer(self, text: int) -> list[NDArray[np.int32]]:
        found = self._ids[self._starts[text] : self._starts[text + 1]]
        return np.split(found, [int(np.argmax(found >= 0))])


class StreamedDataset:
    """Rows cut end to end from a stream of token arrays that can be opened again.

    Index i is the i-th row of the stream repeated for ever, its last incomplete row dropped. The
    cost of a row is the cost of everything before it that was not yet read: each rank reads the
    whole stream, and a resumed run reads again up to where it stopped.
    """

    streamed = True
    masked = False
    packing = False
    target_length = 0

    def __init__(
        self, open_stream: Callable[[], Iterator[NDArray[np.integer]]], sequence: int
    ) -> None:
        self._open_stream = open_stream
        self._sequence = sequence
        self._stream = self._iter_rows()
        self._rows_read = 0
        self._row_S = np.empty(0, dtype=np.int64)
        self._total_rows: int | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``; ``IndexError`` where the stream is shorter than one row."""
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> NDArray[np.int64]:
        wanted = index if self._total_rows is None else index % self._total_rows
        if wanted < self._rows_read - 1:
            self._stream, self._rows_read = self._iter_rows(), 0
        while self._rows_read <= wanted:
            row_S = next(self._stream, None)
            if row_S is None:
                if self._rows_read == 0:
                    raise IndexError("the stream holds no whole row")
                self._total_rows = self._rows_read
                return self._row(index)
            self._row_S, self._rows_read = row_S, self._rows_read + 1
        return self._row_S

    def _iter_rows(self) -> Iterator[NDArray[np.int64]]:
        rest = np.empty(0, dtype=np.int64)
        for tokens in self._open_stream():
            rest = np.concatenate([rest, tokens.astype(np.int64)])
            whole = max(len(rest) - 1, 0) // self._sequence
            for row in range(whole):
                yield rest[row * self._sequence : (row + 1) * self._sequence + 1]
            rest = rest[whole * self._sequence :]


@dataclass(frozen=True)
class RandomDataset:
    """``rows`` rows of ids, the rows from ``first`` of an endless table keyed by ``seed``.

    ``masked_share`` of the tokens are no labels. A row of ``pairs`` is two of the table's. With
    ``packing`` a text begins at every token with a chance of 1 / ``TEXT``. Of what an encoder
    reads, before a ``target_length``, as many tokens are missing.
    """

    seed: int
    vocabulary: int
    first: int
    rows: int
    sequence: int
    masked_share: float = 0.0
    pairs: bool = False
    packing: bool = False
    target_length: int = 0
    streamed: bool = False

    @property
    def masked(self) -> bool:
        """Returns whether any token is no label."""
        return self.masked_share > 0 or self.packing or self.target_length > 0

    def __len__(self) -> int:
        return self.rows

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``tokens_BS``: a hash of (seed, row, place), modulo the vocabulary."""
        if self.pairs:
            index_B2 = 2 * np.asarray(indices)[:, None] + np.arange(2)
            single = replace(self, pairs=False, first=2 * self.first)
            return single.gather(index_B2.flatten()).reshape(*index_B2.shape, -1)
        width = self.sequence + 1
        index_B = np.asarray(indices, dtype=np.int64) + self.first
        place_BS = (index_B[:, None] * width + np.arange(width)).astype(np.uint64)
        key = splitmix64(np.array([self.seed], dtype=np.uint64))
        hash_BS = splitmix64(place_BS + key)
        tokens_BS = (hash_BS % np.uint64(self.vocabulary)).astype(np.int64)
        if self.masked:
            share_BS = splitmix64(hash_BS).astype(np.float64) / 2.0**64
            tokens_BS = np.where(share_BS < self.masked_share, ~tokens_BS, tokens_BS)
        if self.target_length:
            tokens_BS = tokens_BS[:, 1:]
            asked_BS = tokens_BS[:, : -self.target_length]
            asked_BS[:] = np.where(asked_BS < 0, NOTHING, ~asked_BS)
        if self.packing:
            first_BS = splitmix64(~hash_BS) % np.uint64(TEXT) == 0
            whole_BS = np.where(tokens_BS < 0, ~tokens_BS, tokens_BS)
            tokens_BS = np.where(first_BS, ~(whole_BS + FIRST), tokens_BS)
        return tokens_BS


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the SplitMix64 hash of each element (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
