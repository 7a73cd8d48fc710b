"""A rank's share of the rows that a user's own sampler gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Sampler


class Shared(Sampler[int]):
    """Every N-th row of a sampler's order, so that the N ranks together read what one would.

    The order is that of the first rank. Where it does not go evenly into the ranks, its first rows
    are read once more, as torch's ``DistributedSampler`` has it.
    """

    def __init__(
        self, whole: Iterable[int], rank: int, ranks: int, agreed: Callable[[Any], Any]
    ) -> None:
        """``agreed`` gives every rank what the first one has."""
        self._whole, self._rank, self._ranks, self._agreed = whole, rank, ranks, agreed

    def __iter__(self) -> Iterator[int]:
        order: list[int] = self._agreed(list(self._whole))
        lacking = -len(order) % self._ranks
        yield from [*order, *order[:lacking]][self._rank :: self._ranks]

    def __len__(self) -> int:
        return -(-len(self._whole) // self._ranks)  # type: ignore[arg-type]  # samplers have one


def share_out(trainer: Trainer, rank: int, ranks: int) -> None:
    """Has a trainer share rows out by ``Shared``: Lightning's own would also shuffle them."""

    def resolved(loader: DataLoader[Any], shuffle: bool, mode: object = None) -> Any:
        if connector._requires_distributed_sampler(loader):
            return Shared(loader.sampler, rank, ranks, trainer.strategy.broadcast)
        return loader.sampler

    connector = trainer._data_connector
    connector._resolve_sampler = resolved  # type: ignore[method-assign,assignment]  # no public way
