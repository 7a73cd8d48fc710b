"""Micro batches as tensors: a training loader that can be put anywhere, and a validation loader.

Shapes: B rows of a micro batch, T tokens, S = T + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from scalewise.data.base import Rows
from scalewise.data.order import Order
from scalewise.objectives import IGNORED

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
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

    def read(self, rows: Rows, order: Order, micro_steps: int) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, the micro batch that follows ``micro_steps`` others."""
        step, micro_step = divmod(micro_steps, self.accumulation)
        first = (micro_step * self.ranks + self.rank) * self.micro_batch
        real = min(max(self.global_batch - first, 0), self.micro_batch)
        tokens_BS = rows.gather(order.indices(step, first, max(real, 1)))
        if real == self.micro_batch:
            return tokens_BS
        filled_BS = np.full((self.micro_batch, tokens_BS.shape[1]), ~0)
        filled_BS[:real] = tokens_BS[:real]
        return filled_BS

    def masks(self, rows: Rows) -> bool:
        """Returns whether some labels of a global batch may be masked or filled up."""
        filled = self.accumulation * self.micro_batch * self.ranks != self.global_batch
        return filled or rows.masked


class Loader:
    """The training rows in shuffled order, epoch after epoch, for a number of optimizer steps.

    ``micro_steps`` is the number of micro batches yielded so far, and iterating goes on from
    there. Streamed rows come in the order of the stream. Where rows are masked the first micro
    batch of a step says how many labels this rank has in all of the step, ``labels_of_step``.
    """

    def __init__(
        self,
        rows: Rows,
        share: Share,
        *,
        seed: int,
        steps: int,
        start: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._rows, self._share, self._pin_memory = rows, share, pin_memory
        self._order = Order(len(rows), None if rows.streamed else seed, share.global_batch)
        self._length = steps * share.accumulation
        self.micro_steps = start

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        ahead: list[NDArray[np.int64]] = []
        while self.micro_steps < self._length:
            counted = None
            if self._rows.masked and self.micro_steps % self._share.accumulation == 0:
                ahead = [self._read(later) for later in range(self._share.accumulation)]
                counted = sum(int((tokens_BS[:, 1:] >= 0).sum()) for tokens_BS in ahead)
            tokens_BS = ahead.pop(0) if ahead else self._read(0)
            # Counted before the yield: whoever holds the batch sees it counted.
            self.micro_steps += 1
            yield self._as_tensors(tokens_BS, counted)

    def _read(self, later: int) -> NDArray[np.int64]:
        return self._share.read(self._rows, self._order, self.micro_steps + later)

    def _as_tensors(self, tokens_BS: NDArray[np.int64], counted: int | None) -> Batch:
        batch = tensors(tokens_BS, self._pin_memory, masked=self._share.masks(self._rows))
        return batch if counted is None else {**batch, "labels_of_step": torch.tensor(counted)}

    def seek(self, micro_steps: int) -> None:
        """Makes the next batch the one that follows ``micro_steps`` micro batches."""
        self.micro_steps = micro_steps

    def state_dict(self) -> dict[str, int]:
        """Returns ``{"micro_steps": n}``, the micro batches yielded so far."""
        return {"micro_steps": self.micro_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after ``state["micro_steps"]`` micro batches."""
        self.seek(state["micro_steps"])


class ValidationLoader:
    """The first held-out rows in stored order, each once, as many batches on every rank.

    ``share.global_batch`` says how many rows at the most.
    """

    def __init__(self, rows: Rows, share: Share, *, pin_memory: bool = False) -> None:
        self._rows, self._pin_memory = rows, pin_memory
        self._share = replace(share, global_batch=min(share.global_batch, len(rows)))
        self._order = Order(len(rows), None, self._share.global_batch)

    def __len__(self) -> int:
        return self._share.accumulation

    def __iter__(self) -> Iterator[Batch]:
        masked = self._share.masks(self._rows)
        for micro_step in range(len(self)):
            tokens_BS = self._share.read(self._rows, self._order, micro_step)
            yield tensors(tokens_BS, self._pin_memory, masked=masked)


def tensors(tokens_BS: NDArray[np.int64], pin_memory: bool, *, masked: bool) -> Batch:
    """Returns ``inputs`` and ``labels``, both int64 ``x_BT``: views of ``tokens_BS``, or copies.

    ``masked`` ids, those below zero, become inputs without a label. Pinned tensors are copies: a
    view with gaps would not cross to the device in one transfer.
    """
    tokens = torch.from_numpy(tokens_BS)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if masked:
        inputs, labels = batch["inputs"], batch["labels"]
        batch = {
            "inputs": torch.where(inputs < 0, ~inputs, inputs),
            "labels": labels.masked_fill(labels < 0, IGNORED),
        }
    if pin_memory:
        return {name: x_BT.contiguous().pin_memory() for name, x_BT in batch.items()}
    return batch
