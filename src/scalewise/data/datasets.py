"""Datasets of token sequences, packed, padded or streamed, and the shuffle order of their samples.

Shapes: B samples, S = sequence + 1 tokens of a sample (T inputs and one more label).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from scalewise.data.prepare import FIRST_TOKEN_OFFSET, NO_TOKEN
from scalewise.step_counts import StepCounts


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


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``num_samples`` samples in an epoch.

    This is the sorting order of the raw output of Philox, which is stable over all NumPy versions,
    unlike ``Generator.permutation``. Peak memory is 16 bytes per sample, then 8.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")


class ShuffleOrder:
    """Sample indices of every step: the permutations of all epochs, one after the other.

    Each step reads the samples that follow those of the step before it. No sample is dropped, and
    the samples of a step do not depend on the number of ranks. ``seed`` None is the stored order.

    Args:
        num_samples: Number of samples of the dataset.
        seed: Seed of the run.
        global_batch: Samples of one optimizer step.
        samples_per_step: Samples of each step, if ``global_batch`` is not that of all steps.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int | None,
        global_batch: int,
        samples_per_step: StepCounts | None = None,
    ) -> None:
        if num_samples < 1 or global_batch < 1:
            raise ValueError(f"{num_samples} samples cannot fill a global batch of {global_batch}")
        self._num_samples, self._seed = num_samples, seed
        self._samples_per_step = samples_per_step or StepCounts(global_batch)
        # Two: a batch across the end of an epoch alternates between both.
        self._permutation = lru_cache(maxsize=2)(epoch_permutation)

    def indices(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Return ``index_B``, the samples at ``count`` positions of a step's global batch."""
        first += self._samples_per_step.before(step)
        epoch, position = divmod(first, self._num_samples)
        if position + count <= self._num_samples:
            return self._epoch_indices(epoch, np.arange(position, position + count))
        epoch_B, position_B = np.divmod(np.arange(first, first + count), self._num_samples)
        parts = [self._epoch_indices(int(e), position_B[epoch_B == e]) for e in np.unique(epoch_B)]
        return np.concatenate(parts)

    def _epoch_indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._seed is None:
            return positions
        return self._permutation(self._num_samples, self._seed, epoch)[positions]
