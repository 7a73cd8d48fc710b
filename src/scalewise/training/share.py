"""A rank's share of the rows that a user's own sampler or iterable dataset gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset, Sampler


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


class SharedStream(IterableDataset[Any]):
    """Every N-th item of an iterable, so that the N ranks together read what one would.

    Every rank iterates over all items, which have to come in the same order. In a loader with
    workers each worker shares out what it would read on one device. Where the items do not go
    evenly into the ranks, the first ones are read once more, as ``Shared`` has it.
    """

    def __init__(self, whole: Iterable[Any], rank: int, ranks: int) -> None:
        self._whole, self._rank, self._ranks = whole, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        group: list[Any] = []  # complete before any rank yields: all take the same number
        for item in self._whole:
            if len(first) < self._ranks:
                first.append(item)
            group.append(item)
            if len(group) == self._ranks:
                yield group[self._rank]
                group = []
        if group:
            yield [*group, *islice(cycle(first), self._ranks)][self._rank]

    def __len__(self) -> int:
        return -(-len(self._whole) // self._ranks)  # type: ignore[arg-type]  # few streams have one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copies and pickles ask before there is an instance
            raise AttributeError(name)
        return getattr(self._whole, name)


def share_out(trainer: Trainer, rank: int, ranks: int, *, streams: bool) -> None:
    """Has a trainer share rows out by ``Shared``: Lightning's own would also shuffle them.

    ``streams``: whether to share out iterable datasets as well, which Lightning leaves alone.
    """

    def resolved(loader: DataLoader[Any], shuffle: bool, mode: object = None) -> Any:
        if connector._requires_distributed_sampler(loader):
            return Shared(loader.sampler, rank, ranks, trainer.strategy.broadcast)
        return loader.sampler

    def prepared(loader: Any, shuffle: bool, mode: Any) -> Any:
        loader = prepare(loader, shuffle, mode)
        return _of_stream(loader, rank, ranks) if streams and ranks > 1 else loader

    connector = trainer._data_connector
    prepare = connector._prepare_dataloader
    connector._resolve_sampler = resolved  # type: ignore[method-assign,assignment]  # no public way
    connector._prepare_dataloader = prepared  # type: ignore[method-assign,assignment]  # as above


def _of_stream(loader: Any, rank: int, ranks: int) -> Any:
    """Returns a loader whose rows, where it has no sampler to choose them by, are shared out."""
    if isinstance(loader, SharedStream):
        return loader
    if not isinstance(loader, DataLoader):
        return SharedStream(loader, rank, ranks)
    whole = loader.dataset
    by_itself = getattr(whole, "_distributed", None)  # datasets.distributed.split_dataset_by_node
    if not isinstance(whole, IterableDataset) or by_itself is not None:
        return loader
    if not isinstance(whole, SharedStream):
        # A DataLoader lets nobody set it, and how to build a subclass anew is not known.
        object.__setattr__(loader, "dataset", SharedStream(whole, rank, ranks))
    if loader.worker_init_fn is None:  # Lightning seeds workers by rank: orders would differ
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)
    return loader
