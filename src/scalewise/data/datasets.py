"""Datasets of token sequences: packed in memory-mapped shards, padded, streamed or random.

Shapes: B samples, S = sequence + 1 tokens of a sample (T inputs and one more label).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from scalewise.data.base import FIRST_TOKEN_OFFSET, NO_TOKEN

MEAN_TEXT_TOKENS = 32
"""Mean length of a random text, in tokens."""


class PackedDataset:
    """Contiguous sequences of 1-D shards of token ids; a sequence never spans two shards.

    Sequence i of a shard consists of tokens ``i * sequence`` to ``(i + 1) * sequence`` inclusive.
    The last label of a sequence is the first input of the next, so that every token but the first
    of a shard is a label.
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
        """Return ``tokens_BS``, the sequences at ``indices``."""
        index_B = np.asarray(indices, dtype=np.int64)
        if len(self._windows) == 1:
            return self._windows[0][index_B].astype(np.int64)
        tokens_BS = np.empty((len(index_B), self._width), dtype=np.int64)
        shard_B = np.searchsorted(self._ends, index_B, side="right")
        for shard in np.unique(shard_B):
            windows, in_shard_B = self._windows[shard], shard_B == shard
            tokens_BS[in_shard_B] = windows[index_B[in_shard_B] - self._ends[shard] + len(windows)]
        return tokens_BS


class PaddedDataset:
    """One text per sample, truncated, or padded with ``~end_token``; negative ids have no label.

    Text i is ``ids_N[starts[i] : starts[i + 1]]``. A sample of a pair has two texts. ``fill_ratio``
    is the fraction of positions that are not padding.
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
        """``texts``: indices of the texts that become samples, in order; pairs as ``texts_N2``."""
        self._ids, self._starts, self._texts = ids_N, starts, texts
        self._width, self._end_token = sequence + 1, end_token
        self.total_texts = len(starts) - 1
        self.dropped_texts = self.total_texts - texts.size
        lengths = np.diff(starts)[texts]
        self.truncated_texts = int((lengths > self._width).sum())
        positions = lengths.size * self._width
        self.fill_ratio = (
            float(lengths.clip(max=self._width).sum() / positions) if positions else 1.0
        )

    def __len__(self) -> int:
        return len(self._texts)

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``, or ``tokens_B2S`` for pairs, the samples at ``indices``."""
        texts = self._texts[np.asarray(indices)]
        tokens_BS = np.full((texts.size, self._width), ~self._end_token, dtype=np.int64)
        for tokens_S, text in zip(tokens_BS, texts.flat, strict=True):
            ids = self._text_ids(text)
            tokens_S[: len(ids)] = ids
        return tokens_BS.reshape(*texts.shape, self._width)

    def _text_ids(self, text: int) -> NDArray[np.int32]:
        return self._ids[self._starts[text] : self._starts[text + 1]][: self._width]


class ClassificationDataset(PaddedDataset):
    """One text per sample, truncated to leave space for its class index, which follows."""

    def _text_ids(self, text: int) -> NDArray[np.int32]:
        ids = self._ids[self._starts[text] : self._starts[text + 1]]
        return np.concatenate([ids[:-1][: self._width - 1], ids[-1:]])


class Seq2SeqDataset(PaddedDataset):
    """Padded or truncated questions, with the answers in the last ``target_length`` positions."""

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
        """``texts``: indices of the texts, each a question followed by its answer."""
        super().__init__(ids_N, starts, texts, sequence, end_token)
        self.target_length, self._source_length = target_length, sequence - target_length
        lengths = [[*map(len, self._split_answer(text))] for text in texts]
        self.truncated_texts = int(
            (np.array(lengths) > [self._source_length, target_length]).any(1).sum()
        )
        if lengths:
            truncated_lengths = np.minimum(lengths, [self._source_length, target_length])
            self.fill_ratio = float(truncated_lengths.sum() / (len(lengths) * sequence))

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``, the samples at ``indices``, S = sequence."""
        texts = self._texts[np.asarray(indices)]
        question_BS = np.full((len(texts), self._source_length), NO_TOKEN, dtype=np.int64)
        answer_BT = np.full((len(texts), self.target_length), ~self._end_token, dtype=np.int64)
        for question_S, answer_T, text in zip(question_BS, answer_BT, texts, strict=True):
            question_ids, answer_ids = self._split_answer(text)
            question_S[: len(question_ids)] = question_ids[: self._source_length]
            answer_T[: len(answer_ids)] = answer_ids[: self.target_length]
        return np.concatenate([question_BS, answer_BT], axis=1)

    def _split_answer(self, text: int) -> list[NDArray[np.int32]]:
        ids = self._ids[self._starts[text] : self._starts[text + 1]]
        return np.split(ids, [int(np.argmax(ids >= 0))])


class StreamedDataset:
    """Contiguous sequences of a stream of token arrays that can be reopened.

    Index i is the i-th sequence of the endlessly repeated stream, without its last incomplete
    sequence. Reading a sequence reads all tokens before it: each rank reads the whole stream, and a
    resumed run reads the stream again up to its position.
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
        self._stream = self._iter_sequences()
        self._sequences_read = 0
        self._tokens_S = np.empty(0, dtype=np.int64)
        self._total_sequences: int | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``; raises ``IndexError`` for a stream shorter than one sequence."""
        return np.stack([self._read_sequence(int(index)) for index in indices])

    def _read_sequence(self, index: int) -> NDArray[np.int64]:
        position = index if self._total_sequences is None else index % self._total_sequences
        if position < self._sequences_read - 1:
            self._stream, self._sequences_read = self._iter_sequences(), 0
        while self._sequences_read <= position:
            tokens_S = next(self._stream, None)
            if tokens_S is None:
                if self._sequences_read == 0:
                    raise IndexError("the stream is shorter than one sequence")
                self._total_sequences = self._sequences_read
                return self._read_sequence(index)
            self._tokens_S, self._sequences_read = tokens_S, self._sequences_read + 1
        return self._tokens_S

    def _iter_sequences(self) -> Iterator[NDArray[np.int64]]:
        pending = np.empty(0, dtype=np.int64)
        for tokens in self._open_stream():
            pending = np.concatenate([pending, tokens.astype(np.int64)])
            count = max(len(pending) - 1, 0) // self._sequence
            for index in range(count):
                yield pending[index * self._sequence : (index + 1) * self._sequence + 1]
            pending = pending[count * self._sequence :]


@dataclass(frozen=True)
class RandomDataset:
    """``num_samples`` samples of random ids, from index ``first`` of an endless keyed table.

    A sample of ``pairs`` consists of two sequences of the table. With ``packing``, a text begins at
    each token with probability 1 / ``MEAN_TEXT_TOKENS``. With a ``target_length``, the masked
    fraction of the encoder's tokens is missing.
    """

    seed: int
    """Key of the table."""
    vocabulary: int
    """Number of distinct ids."""
    first: int
    """Index of the first sample in the table."""
    num_samples: int
    """Number of samples."""
    sequence: int
    """Sequence length, in tokens."""
    masked_fraction: float = 0.0
    """Fraction of the tokens without a label."""
    pairs: bool = False
    """Whether a sample consists of two sequences."""
    packing: bool = False
    """Whether a sequence contains several texts."""
    target_length: int = 0
    """Number of decoder tokens at the end of a sample."""
    streamed: bool = False
    """Whether indices must be read in increasing order."""

    @property
    def masked(self) -> bool:
        """Whether some tokens have no label."""
        return self.masked_fraction > 0 or self.packing or self.target_length > 0

    def __len__(self) -> int:
        return self.num_samples

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``tokens_BS``: a hash of (seed, sample, position), modulo the vocabulary."""
        if self.pairs:
            index_B2 = 2 * np.asarray(indices)[:, None] + np.arange(2)
            single = replace(self, pairs=False, first=2 * self.first)
            return single.gather(index_B2.flatten()).reshape(*index_B2.shape, -1)
        width = self.sequence + 1
        index_B = np.asarray(indices, dtype=np.int64) + self.first
        position_BS = (index_B[:, None] * width + np.arange(width)).astype(np.uint64)
        key = splitmix64(np.array([self.seed], dtype=np.uint64))
        hash_BS = splitmix64(position_BS + key)
        tokens_BS = (hash_BS % np.uint64(self.vocabulary)).astype(np.int64)
        if self.masked:
            uniform_BS = splitmix64(hash_BS).astype(np.float64) / 2.0**64
            tokens_BS = np.where(uniform_BS < self.masked_fraction, ~tokens_BS, tokens_BS)
        if self.target_length:
            tokens_BS = tokens_BS[:, 1:]
            source_BS = tokens_BS[:, : -self.target_length]
            source_BS[:] = np.where(source_BS < 0, NO_TOKEN, ~source_BS)
        if self.packing:
            first_BS = splitmix64(~hash_BS) % np.uint64(MEAN_TEXT_TOKENS) == 0
            token_BS = np.where(tokens_BS < 0, ~tokens_BS, tokens_BS)
            tokens_BS = np.where(first_BS, ~(token_BS + FIRST_TOKEN_OFFSET), tokens_BS)
        return tokens_BS


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 hash of each element (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
