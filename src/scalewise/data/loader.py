"""Micro batches as tensors: a training loader that can be put anywhere, and a validation loader.

Shapes: B rows of a micro batch, T tokens, S = T + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from scalewise.data.base import Rows
from scalewise.data.order import Order

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """The part of each global batch that one data-parallel rank reads, in rows.

    Raises ``ValueError`` where the ranks' micro batches do not fill the global batch evenly.
    """

    global_batch: int
    micro_batch: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.global_batch % (self.micro_batch * self.ranks):
            each = f"{self.ranks} ranks x {self.micro_batch} rows"
            raise ValueError(f"a global batch of {self.global_batch} is not a multiple of {each}")

    @property
    def accumulation(self) -> int:
        """Returns the micro batches of one optimizer step."""
        return self.global_batch // (self.micro_batch * self.ranks)

    def read(self, rows: Rows, order: Order, micro_steps: int) -> NDArray[np.int64]:
        """Returns ``tokens_BS``, the micro batch that follows ``micro_steps`` others."""
        step, micro_step = divmod(micro_steps, self.accumulation)
        return rows.gather(order.indices(step, micro_step, self.rank, self.ranks, self.micro_batch))


class Loader:
    """The training rows in shuffled order, epoch after epoch, for a number of optimizer steps.

    ``micro_steps`` is the number of micro batches yielded so far, and iterating goes on from
    there. Streamed rows come in the order of the stream.
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
        while self.micro_steps < self._length:
            tokens_BS = self._share.read(self._rows, self._order, self.micro_steps)
            # Counted before the yield: whoever holds the batch sees it counted.
            self.micro_steps += 1
            yield tensors(tokens_BS, self._pin_memory)

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
    """The held-out rows in stored order, from the first, as many batches on every rank.

    Only whole global batches are read, so that every layout averages over the same rows; fewer
    rows than one global batch are repeated to fill it.
    """

    def __init__(self, rows: Rows, share: Share, *, pin_memory: bool = False) -> None:
        self._rows, self._share, self._pin_memory = rows, share, pin_memory
        self._order = Order(len(rows), None, share.global_batch)

    def __len__(self) -> int:
        steps = max(1, len(self._rows) // self._share.global_batch)
        return steps * self._share.accumulation

    def __iter__(self) -> Iterator[Batch]:
        for micro_steps in range(len(self)):
            tokens_BS = self._share.read(self._rows, self._order, micro_steps)
            yield tensors(tokens_BS, self._pin_memory)


def tensors(tokens_BS: NDArray[np.int64], pin_memory: bool) -> Batch:
    """Returns ``inputs`` and ``labels``, both int64 ``x_BT``: views of ``tokens_BS``, or pinned.

    Pinned tensors are copies: a view with gaps would not cross to the device in one transfer.
    """
    tokens = torch.from_numpy(tokens_BS)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if pin_memory:
        return {name: x_BT.contiguous().pin_memory() for name, x_BT in batch.items()}
    return batch
