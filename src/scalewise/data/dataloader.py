"""Micro batches as tensors: a training loader that can be put anywhere, and a validation loader.

Shapes: B rows of a micro batch, T tokens, S = T + 1. Pairs are two rows, one below the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalewise.data.base import FIRST, NOTHING, CaptionedSequences, Sequences
from scalewise.data.shuffle_order import ShuffleOrder
from scalewise.objectives import IGNORED

Batch = dict[str, torch.Tensor]
Gather = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Something of each row, by the rows' indices."""
UNREAL = -1
"""The index of a row that fills a micro batch up."""


@dataclass(frozen=True)
class BatchShare:
    """The part of each global batch that one data-parallel rank reads, in rows.

    Micro batches have one shape: where the rows of a global batch do not fill those of all ranks,
    the last ones are filled up with rows of which no token is a label.
    """

    global_batch: int
    micro_batch: int
    rank: int = 0
    ranks: int = 1

    @property
    def accumulation(self) -> int:
        """Returns the micro batches of one optimizer step."""
        return ceil(self.global_batch / (self.micro_batch * self.ranks))

    def read_micro_batch(
        self, gather: Gather, shuffle_order: ShuffleOrder, micro_steps: int, fill_value: int = ~0
    ) -> NDArray[Any]:
        """Returns what ``gather`` has of the micro batch that follows ``micro_steps`` others."""
        step, micro_step = divmod(micro_steps, self.accumulation)
        first = (micro_step * self.ranks + self.rank) * self.micro_batch
        real = min(max(self.global_batch - first, 0), self.micro_batch)
        found_B = gather(shuffle_order.indices(step, first, max(real, 1)))
        if real == self.micro_batch:
            return found_B
        filled_B = np.full((self.micro_batch, *found_B.shape[1:]), fill_value, found_B.dtype)
        filled_B[:real] = found_B[:real]
        return filled_B

    def has_masked_labels(self, dataset: Sequences) -> bool:
        """Returns whether some labels of a global batch may be masked or filled up."""
        filled = self.accumulation * self.micro_batch * self.ranks != self.global_batch
        return filled or dataset.masked


class MicroBatches:
    """The micro batches of one rank by their number, with what is known of their rows besides."""

    reference_logprobs: NDArray[np.float32] | None = None
    """``logp_N2``, what a reference said of each pair; once it is set, batches hold it."""

    def __init__(
        self, dataset: Sequences, batch_share: BatchShare, seed: int | None, *, pin_memory: bool
    ) -> None:
        self._dataset, self._batch_share, self._pin_memory = dataset, batch_share, pin_memory
        self._order = ShuffleOrder(len(dataset), seed, batch_share.global_batch)
        # Asked once: of a protocol the question costs as much as a batch.
        self._gather_pixels = (
            dataset.gather_pixels if isinstance(dataset, CaptionedSequences) else None
        )

    @property
    def num_samples(self) -> int:
        """Returns how many there are."""
        return len(self._dataset)

    def iter_indexed_batches(self, steps: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yields this rank's part of the rows of ``steps``, each at least once: index and batch."""
        steps = min(steps, ceil(len(self._dataset) / self._batch_share.global_batch))
        for number in range(steps * self._batch_share.accumulation):
            index_B = self._batch_share.read_micro_batch(
                lambda index_B: index_B, self._order, number, UNREAL
            )
            yield index_B, self._to_batch(number, self._read_tokens(number))

    def _read_tokens(self, number: int) -> NDArray[np.int64]:
        return self._batch_share.read_micro_batch(self._dataset.gather, self._order, number)

    def _to_batch(self, number: int, tokens_BS: NDArray[np.int64]) -> Batch:
        batch = as_batch(
            tokens_BS,
            self._pin_memory,
            masked=self._batch_share.has_masked_labels(self._dataset),
            packing=self._dataset.packing,
            target_length=self._dataset.target_length,
        )
        if self._gather_pixels:
            seen = self._batch_share.read_micro_batch(
                self._gather_pixels, self._order, number, fill_value=0
            )
            pixels = torch.from_numpy(seen)
            batch["inputs"] = pixels.pin_memory() if self._pin_memory else pixels
        if self.reference_logprobs is None:
            return batch
        said_B2 = self._batch_share.read_micro_batch(
            self.reference_logprobs.__getitem__, self._order, number, fill_value=0
        )
        said_B = torch.from_numpy(said_B2).flatten()
        return {**batch, "reference": said_B.pin_memory() if self._pin_memory else said_B}


class TrainLoader(MicroBatches):
    """The training rows in shuffled order, epoch after epoch, for a number of optimizer steps.

    ``micro_steps`` is the number of micro batches yielded so far, and iterating goes on from
    there. Streamed rows come in the order of the stream. Where rows are masked the first micro
    batch of a step says how many labels this rank has in all of the step, ``labels_of_step``.
    """

    def __init__(
        self,
        dataset: Sequences,
        batch_share: BatchShare,
        *,
        seed: int,
        steps: int,
        start: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            dataset, batch_share, None if dataset.streamed else seed, pin_memory=pin_memory
        )
        self._length = steps * batch_share.accumulation
        self.micro_steps = start

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        ahead: list[NDArray[np.int64]] = []
        while self.micro_steps < self._length:
            counted = None
            if self._dataset.masked and self.micro_steps % self._batch_share.accumulation == 0:
                numbers = range(self.micro_steps, self.micro_steps + self._batch_share.accumulation)
                ahead = [self._read_tokens(number) for number in numbers]
                written = slice(-self._dataset.target_length or 1, None)
                counted = sum(int((tokens_BS[..., written] >= 0).sum()) for tokens_BS in ahead)
            number = self.micro_steps
            tokens_BS = ahead.pop(0) if ahead else self._read_tokens(number)
            # Counted before the yield: whoever holds the batch sees it counted.
            self.micro_steps += 1
            batch = self._to_batch(number, tokens_BS)
            if counted is not None:
                batch["labels_of_step"] = torch.tensor(counted)
            yield batch

    def seek(self, micro_steps: int) -> None:
        """Makes the next batch the one that follows ``micro_steps`` micro batches."""
        self.micro_steps = micro_steps

    def state_dict(self) -> dict[str, int]:
        """Returns ``{"micro_steps": n}``, the micro batches yielded so far."""
        return {"micro_steps": self.micro_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after ``state["micro_steps"]`` micro batches."""
        self.seek(state["micro_steps"])


class ValidationLoader(MicroBatches):
    """The first held-out rows in stored order, each once, as many batches on every rank.

    ``share.global_batch`` says how many rows at the most.
    """

    def __init__(
        self, dataset: Sequences, batch_share: BatchShare, *, pin_memory: bool = False
    ) -> None:
        batch_share = replace(batch_share, global_batch=min(batch_share.global_batch, len(dataset)))
        super().__init__(dataset, batch_share, None, pin_memory=pin_memory)

    def __len__(self) -> int:
        return self._batch_share.accumulation

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            yield self._to_batch(number, self._read_tokens(number))


def as_batch(
    tokens_BS: NDArray[np.int64],
    pin_memory: bool,
    *,
    masked: bool,
    packing: bool = False,
    target_length: int = 0,
) -> Batch:
    """Returns ``inputs`` and ``labels``, both int64 ``x_BT``: views of ``tokens_BS``, or copies.

    Of ``tokens_B2S`` both sequences of a row become rows.

    ``masked`` ids, those below zero, become inputs without a label. With ``packing`` there are
    ``places`` too: those of the tokens in their own texts, 0 being a text's first. Rows with a
    ``target_length`` become ``inputs_BS``, -1 where there is no token, and ``labels_BT``. Pinned
    tensors are copies: a view with gaps would not cross to the device in one transfer.
    """
    tokens = torch.from_numpy(tokens_BS).view(-1, tokens_BS.shape[-1])
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if target_length:
        batch = {"inputs": tokens[:, :-target_length], "labels": tokens[:, -target_length:]}
    if masked:
        inputs, labels = batch["inputs"], batch["labels"]
        batch = {
            "inputs": torch.where(inputs < 0, ~inputs, inputs),
            "labels": labels.masked_fill(labels < 0, IGNORED),
        }
    if target_length:
        batch["inputs"] = batch["inputs"].masked_fill(batch["inputs"] == ~NOTHING, -1)
    if packing:
        first_BT = batch["inputs"] >= FIRST
        index_T = torch.arange(first_BT.shape[1])
        batch["places"] = index_T - torch.where(first_BT, index_T, 0).cummax(1).values
        batch["inputs"] = torch.where(first_BT, batch["inputs"] - FIRST, batch["inputs"])
    if pin_memory:
        return {name: x_BT.contiguous().pin_memory() for name, x_BT in batch.items()}
    return batch
